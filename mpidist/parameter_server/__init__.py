"""Variables that are spread over shards and over servers."""

from mpidist.parameter_server.sharded_variable import ShardedVariable

__all__ = ["ShardedVariable"]
