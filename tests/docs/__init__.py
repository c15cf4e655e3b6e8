"""The documentation: its programs, its pictures, and the site that ``make docs`` builds of it."""
