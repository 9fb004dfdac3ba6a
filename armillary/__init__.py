"""Armillary plans, trains, serves and diagnoses transformer models.

The names below are the verbs of the command line and their nouns; each is loaded when it is first used, so that
`import armillary` is quick and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armillary.engine.generate import generate as generate
    from armillary.engine.llm import LLM as LLM
    from armillary.engine.request.constraint import Structure as Structure
    from armillary.engine.request.sampling_params import SamplingParams as SamplingParams
    from armillary.errors import ArmillaryError as ArmillaryError
    from armillary.machine.doctor import doctor as doctor
    from armillary.machine.machine import here as here
    from armillary.machine.machine import machine as this_machine
    from armillary.model.weights.convert import convert as convert
    from armillary.model.weights.hf_weights import load_model as load_model
    from armillary.model.weights.hf_weights import save_model as save_model
    from armillary.profiling.record.profile_callable import profile as profile
    from armillary.serving.load.run import load_test as load_test
    from armillary.spec.catalogue import chips as chips
    from armillary.spec.catalogue import cluster as hardware
    from armillary.spec.catalogue import models as models
    from armillary.spec.model import ModelConfig as ModelConfig
    from armillary.store.home import Home as Home
    from armillary.store.resolve_model import resolve_model as resolve_model
    from armillary.store.runs import list_runs as runs
    from armillary.training.prepare_data import prepare as prepare
    from armillary.training.prepare_run import train_recipe as train

__version__ = "0.1.0"

# name -> module:attribute. A subpackage's name (model, cluster) cannot be used: importing it would take its place.
_API = {
    "ArmillaryError": "armillary.errors:ArmillaryError",
    "Home": "armillary.store.home:Home",
    "LLM": "armillary.engine.llm:LLM",
    "ModelConfig": "armillary.spec.model:ModelConfig",
    "SamplingParams": "armillary.engine.request.sampling_params:SamplingParams",
    "Structure": "armillary.engine.request.constraint:Structure",
    "chips": "armillary.spec.catalogue:chips",
    "convert": "armillary.model.weights.convert:convert",
    "doctor": "armillary.machine.doctor:doctor",
    "generate": "armillary.engine.generate:generate",
    "hardware": "armillary.spec.catalogue:cluster",
    "here": "armillary.machine.machine:here",
    "load_model": "armillary.model.weights.hf_weights:load_model",
    "load_test": "armillary.serving.load.run:load_test",
    "models": "armillary.spec.catalogue:models",
    "prepare": "armillary.training.prepare_data:prepare",
    "profile": "armillary.profiling.record.profile_callable:profile",
    "resolve_model": "armillary.store.resolve_model:resolve_model",
    "runs": "armillary.store.runs:list_runs",
    "save_model": "armillary.model.weights.hf_weights:save_model",
    "this_machine": "armillary.machine.machine:machine",
    "train": "armillary.training.prepare_run:train_recipe",
}

__all__ = [
    "LLM",
    "ArmillaryError",
    "Home",
    "ModelConfig",
    "SamplingParams",
    "Structure",
    "__version__",
    "chips",
    "convert",
    "doctor",
    "generate",
    "hardware",
    "here",
    "load_model",
    "load_test",
    "models",
    "prepare",
    "profile",
    "resolve_model",
    "runs",
    "save_model",
    "this_machine",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module 'armillary' has no attribute '{name}'")
    module, attribute = _API[name].split(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
