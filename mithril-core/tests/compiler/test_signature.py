"""Properties of the inputs of compiled models."""

from mithril.compiler.signature import InputSpec


def test_names_for_messages_are_not_part_of_an_input():
    spec = InputSpec("hiden", produced=frozenset({"hidden", "active"}))
    assert spec.misspelling == "no layer produces 'hiden'; did you mean 'hidden'?"
    # Processes compare texts of inputs, and order sets differently.
    assert repr(spec) == repr(InputSpec("hiden"))
    assert spec == InputSpec("hiden")
