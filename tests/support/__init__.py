"""Tools that several test folders share; nothing here is part of the package."""
