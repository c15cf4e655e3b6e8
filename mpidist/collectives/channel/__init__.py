"""The common part of all collectives: order, handshake, works, deadlines and shutdown."""
