"""Reports: the files of a run, and tables, comparisons and plots of them."""
