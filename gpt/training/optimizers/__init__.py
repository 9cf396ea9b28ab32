"""The optimizers, and the settings that choose and configure them."""

from gpt.training.optimizers.recipe import OptimizerConfig, build_optimizer

__all__ = ["OptimizerConfig", "build_optimizer"]
