"""A planned request: the generations for the owner thread, and the readers of their answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engines.mlx_worker.answer.output_processor import OutputProcessor
from engines.mlx_worker.generation import Generation
from engines.mlx_worker.grammar.grammar import GrammarProcessor


@dataclass
class RequestPlan:
    """One HTTP request: a generation for each prompt, and an output processor for each choice.

    Choice ``i`` is answer ``i % num_choices`` of generation ``i // num_choices``.
    """

    num_choices: int  # of each prompt
    generations: list[Generation] = field(default_factory=list)
    outputs: list[OutputProcessor] = field(default_factory=list)
    grammars: list[GrammarProcessor] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(generation.prompt) for generation in self.generations)

    def serve_to(self, tenant: str, weight: int) -> None:
        """Note whose share of the engine it takes, and the weight of that share."""
        self.generations = [replace(x, tenant=tenant, weight=weight) for x in self.generations]
