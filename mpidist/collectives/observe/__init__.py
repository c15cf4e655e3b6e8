"""Observers of the collectives: hang reports, records, traces."""
