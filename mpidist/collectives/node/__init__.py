"""The ranks of one node: the board on which they meet, the memory they share, and how data move among them."""
