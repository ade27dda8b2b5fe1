"""How long a step may get, by what steps have cost so far: prompts and batch work beside answers that stream."""

from typing import Final

from tie.runtime.plan import Plan
from tie.runtime.scheduler import Beside
from tie.runtime.step_cost import StepCost

# How many times as long a step of interactive answers may get by a prompt that somebody waits for, and by batch work.
_PROMPT_PATIENCE: Final = 2.25
_BATCH_PATIENCE: Final = 1.5


class Pace:
    """Learns the cost of steps, and says how many tokens the next one may compute.

    Args:
        step_tokens: the most.

    Attributes:
        decode_cost: of steps without a prompt, by rows.
    """

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        # Apart, because a prompt's rows compute fewer logits.
        self.decode_cost, self._prompt_cost = StepCost(), StepCost()

    def record(self, plan: Plan, seconds: float) -> None:
        """Takes what a step has cost."""
        cost = self.decode_cost if all(part.logits for part in plan.slices) else self._prompt_cost
        cost.record(plan.tokens, seconds)

    def tokens(self, decodes: int, kind: Beside, prompts: int) -> int:
        """How many tokens a step may compute beside so many interactive sequences that decode.

        Longer where more wait for a first token than read on: else the first of many who come at once holds up all.
        """
        alone = self.decode_cost.seconds(decodes)
        if alone is None:
            return self._step_tokens
        cost = self.decode_cost if kind is Beside.DECODES else self._prompt_cost
        patient = kind is Beside.INTERACTIVE_PROMPTS
        patience = _PROMPT_PATIENCE * max(1.0, prompts / decodes) if patient else _BATCH_PATIENCE
        return cost.rows_within(patience * alone, self._step_tokens)
