"""The scale of the loss in mixed precision."""

from typing import Any

import torch

_FIRST_SCALE = 2.0**16
_MAX_SCALE = 2.0**24
"""The largest scale, far below the range of float32, because a float32 model never overflows."""


class LossScale:
    """The factor of the loss that keeps small gradients above 0 in float16: torch's GradScaler, and its policy.

    The policy is applied here, because a step already knows whether it was finite, for model and rows together. The
    scaler would wait for the device again.

    Args:
        growth_interval: Steps without infinity after which the scale is doubled; a step with one halves it.
        device: The device of the loss.
    """

    def __init__(self, growth_interval: int, device: str = "cuda") -> None:
        self.scaler = torch.amp.GradScaler(device, init_scale=_FIRST_SCALE, growth_interval=growth_interval)
        self.value = _FIRST_SCALE
        self._good_steps = 0
        self._is_unscaled = False

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, once in a step."""
        self._is_unscaled = True
        self.scaler.unscale_(optimizer)

    def abandon(self) -> None:
        """Forget that gradients were unscaled in a step that is not applied, or is repeated. The scale stays."""
        if self._is_unscaled:
            self._is_unscaled = False
            self.scaler.update(self.value)

    def update(self, *, finite: bool) -> None:
        """Choose the scale of the next step."""
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.value *= self.scaler.get_backoff_factor()
        elif self._good_steps % self.scaler.get_growth_interval() == 0:
            self.value = min(self.value * self.scaler.get_growth_factor(), _MAX_SCALE)
        self._is_unscaled = False
        self.scaler.update(self.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the number of steps since it changed."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from such a state."""
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
        self.scaler.load_state_dict(
            {
                "scale": self.value,
                "growth_factor": self.scaler.get_growth_factor(),
                "backoff_factor": self.scaler.get_backoff_factor(),
                "growth_interval": self.scaler.get_growth_interval(),
                "_growth_tracker": 0,
            }
        )
