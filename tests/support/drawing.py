"""How hypothesis draws examples in these tests; imported before the first file that uses it."""

from __future__ import annotations

import hypothesis

# All ranks must draw the same examples: nothing random, stored, shrunk (each shrinking step depends on one
# rank's outcome) or decided by the clock.
hypothesis.settings.register_profile(
    "ranks",
    derandomize=True,
    database=None,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    report_multiple_bugs=False,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("ranks")
