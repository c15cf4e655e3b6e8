"""What ``make dist`` builds, and the recipes of packaging/."""
