"""Plain ``nn.Module`` s. Add yours here or in a file of your own: nothing has to be registered."""

from project.models.generate import Generate
from project.models.linear import LinearModel
from project.models.standardise import Standardise

__all__ = ["Generate", "LinearModel", "Standardise"]
