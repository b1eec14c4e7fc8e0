"""The points of a run at which a hook is called."""

from megatron.training.progress import StepOutcome
from megatron.training.run import Run


class Hook:
    """A concern of the run other than training itself. Every method is called on every rank."""

    def before_training(self, run: Run) -> None:
        """Called once, before the first iteration."""

    def after_step(self, run: Run, outcome: StepOutcome, elapsed_seconds: float) -> None:
        """Called after each iteration, when ``run.progress`` counts it; hooks run in the order of their list.

        Args:
            run: the run; setting ``run.stop_reason`` ends it after this iteration's hooks.
            outcome: what the iteration came to, the same on every rank.
            elapsed_seconds: how long the iteration took on this rank.
        """

    def after_training(self, run: Run) -> None:
        """Called once, after the last iteration, unless an error ended the run; hooks run in reverse order.

        So the last weights are saved before anything else can go wrong with them.
        """
