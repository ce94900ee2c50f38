"""Which columns fit a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobs.view.columns import GAP, LEAST_NAME, cut, fitted_widths

ALWAYS = ("state", "step")
EXTRA = ("att", "job")
FLEXIBLE = ("reason", "overrides")


@given(
    widths=st.fixed_dictionaries(
        {"run": st.integers(3, 90), "state": st.integers(3, 12)},
        optional={name: st.integers(1, 300) for name in (*EXTRA, *FLEXIBLE)},
    ),
    total=st.integers(40, 250),
)
def test_columns_never_exceed_the_terminal_and_the_important_ones_are_whole(
    widths: dict[str, int], total: int
) -> None:
    shown = fitted_widths(widths, total, name="run", always=ALWAYS, extra=EXTRA, flexible=FLEXIBLE)
    assert sum(shown.values()) + GAP * (len(shown) - 1) <= total
    assert shown["state"] == widths["state"]
    assert shown["run"] >= min(widths["run"], LEAST_NAME)
    assert all(size <= widths[title] for title, size in shown.items())
    assert list(shown) == [title for title in widths if title in shown]
    if sum(widths.values()) + GAP * (len(widths) - 1) <= total:
        assert shown == widths


def test_a_text_is_cut_where_it_matters_least() -> None:
    assert cut("sweep/12", 8) == "sweep/12"
    assert cut("sweep/12", 5, in_front=True) == "…p/12"
    assert cut("lr=1e-4 n=8", 6) == "lr=1e…"
