"""What ``python -m mpidist doctor`` gathers: facts of each rank, and what the ranks find out together."""
