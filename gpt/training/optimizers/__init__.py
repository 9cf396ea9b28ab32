"""The optimizers and the recipe that selects and sets them."""

from gpt.training.optimizers.recipe import OptimizerConfig, build_optimizer

__all__ = ["OptimizerConfig", "build_optimizer"]
