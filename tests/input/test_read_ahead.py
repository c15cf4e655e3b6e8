"""Reading ahead: how far, when the thread ends, and what it raises."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from mpidist.input.threads import ReadAhead, Readers

pytestmark = pytest.mark.one_rank

SECONDS = 60


def readers_alive():
    return [thread for thread in threading.enumerate() if thread.name == "mpidist-read-ahead"]


class Numbers:
    """An endless generator of numbers that knows how far it is, and whether it has been closed."""

    def __init__(self):
        self.changed = threading.Condition()
        self.yielded = 0
        self.closed_in = None

    def __call__(self):
        try:
            while True:
                with self.changed:
                    self.yielded += 1
                    self.changed.notify_all()
                yield self.yielded
        finally:
            with self.changed:
                self.closed_in = threading.current_thread().name
                self.changed.notify_all()

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), SECONDS)


def test_close_ends_the_thread_and_closes_the_generator_in_it():
    numbers = Numbers()
    elements = ReadAhead(numbers, 2)
    next(elements)
    elements.close()
    assert readers_alive() == []
    assert numbers.closed_in == "mpidist-read-ahead"
    with pytest.raises(StopIteration):
        next(elements)
    elements.close()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_any_exception_reaches_the_user(error):
    def source():
        raise error
        yield

    with pytest.raises(error):
        next(ReadAhead(source, 1))


def test_what_was_read_is_closed_also_while_somebody_holds_the_error():
    numbers = Numbers()

    def fail(_):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk") as caught:
        next(ReadAhead(lambda: map(fail, numbers()), 1))
    assert numbers.closed_in == "mpidist-read-ahead"
    assert caught.traceback[-1].name == "fail"


def test_errors_make_no_cycles():
    class Failed(Exception):
        pass

    def source():
        raise Failed
        yield

    def fail():
        try:
            next(ReadAhead(source, 1))
        except Failed as error:
            return weakref.ref(error)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_closing_a_pass_ends_all_its_threads_also_nested_ones():
    readers = Readers()
    numbers = Numbers()
    outer = readers.open(lambda: readers.open(numbers, 2), 2)
    other = readers.open(numbers, 2)
    assert (next(outer), next(other) > 0) == (1, True)
    assert len(readers_alive()) == 3
    readers.close()
    assert readers_alive() == []
    assert list(readers.open(numbers, 2)) == []
    readers.close()


@pytest.mark.jobs
def test_a_program_that_ends_in_the_middle_of_a_pass():
    code = (
        "import itertools\n"
        "from mpidist.input import Dataset\n"
        "kept = iter(Dataset.from_generator(itertools.count).batch(100).prefetch(3))\n"
        "print(next(kept).sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "4950", "")
