from pathlib import Path

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpidist(PythonPackage):
    """The tf.distribute programming model on the ranks of an MPI job, for NumPy and CuPy arrays, without TensorFlow."""

    # Not published yet: the sdist that make dist has put beside the folder of recipes.
    url = f"file://{Path(__file__).resolve().parents[6]}/mpidist-@VERSION@.tar.gz"
    # Other modules need packages that Spack does not install for this one, such as PyTorch.
    import_modules = ["mpidist", "mpidist.native"]

    license("Apache-2.0")

    version("@VERSION@", sha256="@SHA256@")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-numpy@1.24:", type="run")
    depends_on("py-mpi4py@4.0:", type="run")
