"""Wrong arguments of constructors and methods: the argument to blame, the nearest name, the remedy."""

import pytest

import mithril as ml
from mithril.backend.checked_calls import CheckedType, checked
from mithril.graph.errors import ModelError, OptionError, closest
from mithril.models import Dropout, Reshape, TransformerEncoder


class Checked(metaclass=CheckedType):
    argument_hints = {"lr": "write rate="}

    def __init__(self, size, rate=0.1, *, flag=False):
        if size == "broken":
            raise TypeError("from inside")

    @checked(y="put it into the data")
    def fit(self, data, epochs=1):
        if data == "broken":
            len(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Checked(1, sise=2),
            "Checked has no argument 'sise'\n  accepted: size, rate, flag\nhint: did you mean 'size'?",
        ),
        (lambda: Checked(1, lr=2), "Checked has no argument 'lr'\n  accepted: size, rate, flag\nhint: write rate="),
        (lambda: Checked(), "Checked requires 'size'\n  accepted: size, rate, flag"),
        (lambda: Checked(1, 2, True), "Checked takes 2 arguments by position (size, rate), got 3, surplus: True"),
        (lambda: Checked(1, size=3), "Checked got 'size' twice: 1 by position and 3 by name"),
        (lambda: Checked(1).fit(1, 2, 3), "Checked.fit takes 2 arguments by position (data, epochs), got 3"),
        (
            lambda: Checked(1).fit(1, y=3),
            "Checked.fit has no argument 'y'\n  accepted: data, epochs\nhint: put it into",
        ),
    ],
)
def test_argument_to_blame_is_named(call, message):
    with pytest.raises(OptionError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_type_errors_from_inside_stay():
    with pytest.raises(TypeError, match="from inside"):
        Checked("broken")
    with pytest.raises(TypeError, match="len"):
        Checked(1).fit("broken")


def test_layer_constructor_blames_the_right_argument():
    with pytest.raises(ModelError, match=r"\(layers, features, heads, feedforward\), got 5, surplus: 0.5"):
        TransformerEncoder(6, 384, 12, 1536, 0.5, dropout=0.0)
    with pytest.raises(
        ModelError, match=r"TransformerEncoderLayer has no argument 'dropuot'(?s:.)*did you mean 'dropout'"
    ):
        TransformerEncoder(6, 384, 12, dropuot=0.0)
    with pytest.raises(ModelError, match=r"takes 1 argument by position \(p\), got 2, surplus: 0.2"):
        Dropout(0.1, 0.2)


def test_suggestions_ignore_case():
    assert closest("ReLU", ["Relu", "Elu"], 1) == ["Relu"]
    assert closest(3, ["input"]) == []
    with pytest.raises(AttributeError, match="did you mean 'Relu'"):
        ml.models.ReLU


def test_values_by_position_that_are_given_by_name():
    with pytest.raises(ml.MithrilError, match="Reshape takes 'shape' by position") as error:
        Reshape(shape=(1, -1))
    assert "without 'shape='" in error.value.hint
