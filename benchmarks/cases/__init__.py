"""Cases: what is measured, mpidist beside others in the same processes."""
