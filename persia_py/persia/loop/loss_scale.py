"""Loss scaling for mixed precision."""

from typing import Any

import torch

_FIRST_SCALE = 2.0**16
_MAX_SCALE = 2.0**24
"""The maximum scale. Without it, the scale of a loss whose gradients never overflow would grow beyond float32."""


class LossScale:
    """Scales the loss to keep small gradients above 0 in float16: torch's GradScaler with a separate policy.

    This class has its own policy, because each step already determines whether all gradients of model and rows are
    finite. GradScaler would wait for the device again.

    Args:
        growth_interval: The number of steps without infinity after which the scale is doubled. A step with infinity
            halves it.
        device: The device of the loss.
    """

    def __init__(self, growth_interval: int, device: str = "cuda") -> None:
        self.scaler = torch.amp.GradScaler(device, init_scale=_FIRST_SCALE, growth_interval=growth_interval)
        self.value = _FIRST_SCALE
        self._good_steps = 0
        self._is_unscaled = False

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, once per step."""
        self._is_unscaled = True
        self.scaler.unscale_(optimizer)

    def abandon(self) -> None:
        """Discard the record that gradients were unscaled, for a step that is not applied or is repeated.

        The scale is unchanged.
        """
        if self._is_unscaled:
            self._is_unscaled = False
            self.scaler.update(self.value)

    def update(self, *, finite: bool) -> None:
        """Set the scale for the next step."""
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.value *= self.scaler.get_backoff_factor()
        elif self._good_steps % self.scaler.get_growth_interval() == 0:
            self.value = min(self.value * self.scaler.get_growth_factor(), _MAX_SCALE)
        self._is_unscaled = False
        self.scaler.update(self.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the number of steps since the last step with NaN or infinity."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` returned."""
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
