"""What all collectives of a communicator have in common: order, handshake, works, deadlines, and how a rank leaves."""
