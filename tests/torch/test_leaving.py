"""Process groups that a rank leaves without the others."""

from __future__ import annotations

from textwrap import dedent

import pytest

from tests.support.ranks import jobs

torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
IS_BACKEND = hasattr(torch._C._distributed_c10d.Backend, "supports_reconfigure")

pytestmark = [pytest.mark.torch, pytest.mark.one_rank, pytest.mark.jobs]

START = """
import threading, time, torch, torch.distributed as dist
from mpidist.errors import PeerError
from tests.support.speed import scaled
dist.init_process_group("mpidist")
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group()

def ends(wait):
    began = time.monotonic()
    try:
        wait()
    except (PeerError, RuntimeError) as error:
        assert "aborted" in str(error), error
        assert time.monotonic() - began < scaled(5)
        return
    raise AssertionError("it has come to its end")
"""


def run(program: str, ranks: int = 2) -> None:
    done = jobs.run_script(START + dedent(program) + "print('end')", ranks)
    assert (done.returncode, done.stdout.split()) == (0, ranks * ["end"]), done.stderr


def test_works_on_their_way_end() -> None:
    run(
        """
        if rank == 0:
            works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(3)]
            works.append(dist.irecv(torch.ones(3), 1, group))
            dist.distributed_c10d._abort_process_group(group)
            for work in works:
                ends(work.wait)
                ends(work.get_future().wait)
        # The other groups go on.
        dist.barrier()
        """
    )


def test_a_thread_that_waits_is_let_go() -> None:
    run(
        """
        if rank == 0:
            threading.Timer(0.5, group.abort).start()
            ends(lambda: dist.barrier(group))
            ends(lambda: dist.all_reduce(torch.ones(3), group=group))
        dist.barrier()
        """
    )


def test_the_other_ranks_may_have_come() -> None:
    """What was on its way is done when the program ends, for those that wait for it."""
    run(
        """
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, group=group, async_op=True) if rank == 0 else None
        dist.barrier()
        if rank == 0:
            group.abort()
            ends(work.wait)
        else:
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [2, 2, 2]
        """
    )


def test_all_begin_anew() -> None:
    run(
        """
        works = [dist.all_reduce(torch.ones(3), async_op=True)] if rank == 0 else []
        dist.distributed_c10d._abort_process_group()
        for work in works:
            ends(work.wait)
        assert not dist.is_initialized()
        dist.init_process_group("mpidist")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2]
        """
    )


def test_an_error_of_backward_is_one_of_the_program() -> None:
    """And no crash of C++, where DDP waits."""
    run(
        """
        from mpidist.errors import MismatchError
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
        try:
            if rank == 0:
                model(torch.ones(2, 10)).sum().backward()
            else:
                dist.broadcast(torch.ones(3), 0)
        except (MismatchError, RuntimeError) as error:
            assert "rank 1: broadcast from rank 0 of float32(3,)" in str(error), error
        else:
            raise AssertionError
        """
    )


@pytest.mark.skipif(not IS_BACKEND, reason="dist.shrink_group wants a Backend, which Python makes from torch 2.14 on")
def test_a_group_shrinks() -> None:
    run(
        """
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        if rank == 1:
            # It takes no part, and is there: a rank that is gone would end the job.
            store.wait(["shrunk"])
        else:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            left = dist.shrink_group([1])
            ends(work.wait)
            assert (left.size(), left.rank(), dist.get_world_size()) == (2, rank // 2, 2)
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            some = dist.new_group([0])
            if rank == 0:
                dist.all_reduce(tensor, group=some)
            assert tensor.tolist() == [2, 2, 2]
            dist.destroy_process_group()
            store.set("shrunk", "yes")
        """,
        3,
    )
