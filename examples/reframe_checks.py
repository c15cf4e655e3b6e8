"""ReFrame checks for centres: the ranks are one world, doctor finds nothing wrong, and training learns.

reframe -C SITE_SETTINGS.py -c examples/reframe_checks.py -S python=/path/to/venv/bin/python -r
"""

# ReFrame puts variable, run_before and sanity_function into the namespace of its classes, and copies their lists.
# ruff: noqa: F821, RUF012

from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn

WORLD = """
import mpidist
world = mpidist.Communicator()
total = world.all_reduce('SUM', 1.0)
if world.rank == 0:
    print('mpidist world', world.size, 'sum', int(total))
"""


class MpidistCheck(rfm.RunOnlyRegressionTest):
    """What the checks share: any system and environment, and a Python in which mpidist is installed."""

    python = variable(str, value="python3")
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    sourcesdir = None
    num_tasks = 4
    num_tasks_per_node = 2
    env_vars = {"OMP_NUM_THREADS": 1}
    maintainers = ["mpidist"]
    tags = {"mpidist"}

    @run_before("run")
    def set_executable(self):
        """The same Python on all ranks."""
        self.executable = self.python


@rfm.simple_test
class MpidistWorldCheck(MpidistCheck):
    """A launcher that does not fit the MPI gives N worlds of one rank, all with exit code 0."""

    descr = "all ranks are in one world, and their sum is right"

    @run_before("run")
    def write_program(self):
        """The program goes beside the job script."""
        Path(self.stagedir, "world.py").write_text(WORLD)
        self.executable_opts = ["world.py"]

    @sanity_function
    def one_world(self):
        """One line, with all ranks in it."""
        line = rf"^mpidist world {self.num_tasks} sum {self.num_tasks}$"
        return sn.all(
            [
                sn.assert_found(line, self.stdout),
                sn.assert_eq(sn.count(sn.findall(r"mpidist world", self.stdout)), 1),
                sn.assert_eq(self.job.exitcode, 0),
            ]
        )


@rfm.simple_test
class MpidistDoctorCheck(MpidistCheck):
    """Launcher, binding, shared memory, GPUs, network and reachability of all pairs of ranks."""

    descr = "python -m mpidist doctor finds no error"
    executable_opts = ["-m", "mpidist", "doctor", "--json"]

    @sanity_function
    def no_error(self):
        """Warnings pass, such as of a network slower than usual; the exit code is 1 after them, too."""
        return sn.all(
            [
                # The document is whole: it ends as it has begun.
                sn.assert_found(r"^\{\n(.*\n)*  \"findings\": \[(.*\n)*\}$", self.stdout),
                sn.assert_not_found(r'^ +"level": "error"', self.stdout),
            ]
        )


@rfm.simple_test
class MpidistTrainCheck(MpidistCheck):
    """examples/train.py of the checkout that this file is in."""

    descr = "a small network learns to read digits"

    @run_before("run")
    def set_options(self):
        """By its whole path: job scripts run in a folder of their own."""
        program = Path(__file__).resolve().with_name("train.py")
        self.executable_opts = [str(program), "--out", "out"]

    @sanity_function
    def it_learned(self):
        """On the digits that it was not shown."""
        accuracy = sn.extractsingle(r"^done .*test accuracy ([\d.]+)%", self.stdout, 1, float)
        return sn.assert_ge(accuracy, 90.0)
