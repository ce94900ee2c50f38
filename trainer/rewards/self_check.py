"""Whether each rule accepts its own truths: a rule that doesn't would reward nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from trainer.base.errors import UserError
from trainer.base.reward_rules import (
    CODE_SOURCES,
    DEFAULT,
    RULES,
    RuleName,
    matches,
    rule_of,
    rule_or_default,
)
from trainer.data import SourceTruth
from trainer.rewards.rules.plain_text import has_words, plain_text
from trainer.rewards.scorer import Scorer
from trainer.rewards.types import RewardRequest

_FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "The answer is {}.")


def check_truths(truths: Iterable[SourceTruth], rules: Mapping[str, RuleName]) -> list[str]:
    """Judge every truth against itself: as bare text, boxed, after ``####`` and in prose.

    Returns notes for the start of a run: sources that nothing names, and ``rules`` of sources that
    no row has. Raises UserError that names row and rule for a truth that its rule refuses, and the
    source for one that no built-in rule can judge.
    """
    rows = list(truths)
    for row in rows:
        if row.data_source in CODE_SOURCES and rule_of(row.data_source, rules) is None:
            raise UserError(
                f"{row.location}: data_source '{row.data_source}' has programs for answers, which "
                f"no built-in rule judges ({', '.join(RULES)}): set custom_reward_function.path to "
                f"a function that runs them, or reward.rules.{row.data_source}=RULE"
            )
    tried = [
        (row, response)
        for row in rows
        for response in _responses(row.ground_truth, rule_or_default(row.data_source, rules))
    ]
    requests = [
        RewardRequest(
            data_source=row.data_source, solution_text=response, ground_truth=row.ground_truth
        )
        for row, response in tried
    ]
    with Scorer(rules=rules) as scorer:
        scores = scorer.score(requests)
    for (row, response), score in zip(tried, scores, strict=True):
        if score.value != 1.0:
            raise _refused(row, response, rule_or_default(row.data_source, rules))
    return [*_unnamed(rows, rules), *_unmet(rows, rules)]


def _responses(ground_truth: object, rule: RuleName) -> Iterator[str]:
    """Responses that give the truth, of each truth of several. An exact match may have truths that
    a box or a line can't hold, and a formula may go over several lines.
    """
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    for truth in truths:
        text = str(truth)
        yield text
        if "\\boxed" in text or "####" in text:
            continue
        line = text.strip()
        if rule == "maths" and not has_words(plain_text(text)):
            line = " ".join(text.split())
        if rule != "exact_match" or text.count("{") == text.count("}"):
            yield _FORMS[1].format(text)
        if rule != "exact_match" or "\n" not in line:
            yield from (form.format(line) for form in _FORMS[2:])


def _refused(row: SourceTruth, response: str, rule: RuleName) -> UserError:
    others = ", ".join(name for name in RULES if name != rule)
    return UserError(
        f"{row.key}: {row.location}: the {rule} rule, which judges data_source "
        f"'{row.data_source}', says no to this row's own right answer "
        f"{str(row.ground_truth)[:80]!r} when a response writes it as {response[:100]!r}. Correct "
        f"the answer, type 'reward.rules.{row.data_source}=RULE' for another rule ({others}), or "
        "set custom_reward_function.path to a function of your own"
    )


def _unnamed(rows: list[SourceTruth], rules: Mapping[str, RuleName]) -> list[str]:
    sources = {row.data_source: rule_of(row.data_source, rules) for row in rows if row.named}
    unnamed = sorted(source for source, rule in sources.items() if rule is None)
    if not unnamed:
        return []
    return [
        f"data_source {', '.join(unnamed[:8])}: no rule of its own, judged by the {DEFAULT} rule; "
        f"'reward.rules.{unnamed[0]}=RULE' takes another ({', '.join(RULES)})"
    ]


def _unmet(rows: list[SourceTruth], rules: Mapping[str, RuleName]) -> list[str]:
    """A warning for each of ``rules`` that judges none of the rows."""
    sources = {row.data_source for row in rows}
    listed = ", ".join(sorted(sources)[:8]) or "none"
    return [
        f"[WARNING] reward.rules.{name}={rule}: none of the rows looked at has this data_source "
        f"(found: {listed})"
        for name, rule in rules.items()
        if not any(matches(source, name) for source in sources)
    ]
