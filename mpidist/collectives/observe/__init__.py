"""Records of the collectives of this rank: flight record, trace, report and status."""
