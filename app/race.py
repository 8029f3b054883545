"""`Race`: the same prompts by D-cut, by verifying every draft and plainly, in turn, and whether their texts agree."""

from __future__ import annotations

from collections.abc import Generator

from hf_dcut.app.models import Models
from hf_dcut.app.run import Run
from hf_dcut.app.settings import Limits, Settings
from hf_dcut.app.trace import Trace, disagreement

ORDER = ("cut", "all", "plain")


class Race:
    """Three runs of one batch.

    Args:
        models: loaded.
        settings: checked.
        limits: of the page.

    Attributes:
        traces: of the runs that have begun, in `ORDER`.
    """

    def __init__(self, models: Models, settings: Settings, limits: Limits):
        self.models, self.settings, self.limits = models, settings, limits
        self.traces: list[Trace] = []
        self.done = False

    def steps(self) -> Generator[Trace]:
        """Yields the running method's trace: once it is open, and after every step."""
        for method in ORDER:
            run = Run(self.models, self.settings, self.limits, method)
            try:
                run.open()
                self.traces.append(run.trace)
                yield run.trace
                while not run.done:
                    run.step()
                    yield run.trace
            finally:
                run.close()
        self.done = True

    def differences(self) -> list[int | None]:
        """Returns for each request where any method's tokens first differ from the first one's; None when none do."""
        first, *others = self.traces
        found = []
        for number, answer in enumerate(first.answers):
            places = [disagreement(answer, other.answers[number]) for other in others]
            found.append(min((place for place in places if place is not None), default=None))
        return found
