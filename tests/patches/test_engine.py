"""What an edit does, and each way in which it can go wrong. All sources here are made up."""

import itertools
import textwrap
from pathlib import Path
from typing import Any

import pytest

from patches import layout as layout_module
from patches.engine import apply_patches
from patches.format import Edit, Landed, NoMatch, Patch, PatchError, load_patches, rename, select
from patches.layout import Layout
from patches.status import Status, judge

FILE = "lightning/pytorch/boat.py"


def make_edit(patch: str = "row", file: str = FILE, scope: str | None = None, **spec: str) -> Edit:
    return Edit(patch, {"file": file, **({"in": scope} if scope else {}), **spec})


def make_patch(
    *edits: Edit, name: str = "row", adds: list[str] | None = None, requires: list[str] | None = None
) -> Patch:
    return Patch(name, "Row", "Faster.", "own", [], "never", adds or [], requires or [], list(edits))


def write_tree(tree: Path, source: str | bytes) -> Path:
    (tree / "lightning/fabric").mkdir(parents=True)
    (tree / "lightning/pytorch").mkdir()
    (tree / "lightning/fabric/__init__.py").write_bytes(b"")
    (tree / FILE).write_bytes(source if isinstance(source, bytes) else textwrap.dedent(source).encode())
    return tree


def read_tree(tree: Path) -> dict[str, bytes]:
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def result(tmp_path: Path, source: str | bytes, *edits: Edit) -> str:
    tree = write_tree(tmp_path / "tree", source)
    assert apply_patches(tree, [make_patch(*edits)]) == {tree / FILE: ["row"]}
    return (tree / FILE).read_bytes().decode()


def error(tmp_path: Path, source: str | bytes, *edits: Edit, kind: type[PatchError] | None = None) -> str:
    """The message for the last of ``edits``, which must name its patch, file and scope and leave the tree as it was."""
    tree = write_tree(tmp_path / "tree", source)
    harmless = make_edit("steer", file="lightning/pytorch/rudder.py", find="old", replace="new")
    (tree / harmless.spec["file"]).write_bytes(b"old\n")
    before = read_tree(tree)
    with pytest.raises(PatchError) as caught:
        apply_patches(tree, [make_patch(harmless, name="steer"), make_patch(*edits)])
    assert kind is None or type(caught.value) is kind
    assert read_tree(tree) == before
    for part in (edits[-1].patch, edits[-1].spec["file"], edits[-1].spec.get("in", "<module>")):
        assert repr(part) in str(caught.value)
    return str(caught.value)


def text(source: str) -> str:
    return textwrap.dedent(source)


class TestShadowing:
    @pytest.mark.parametrize("source", ["def go():\n    oar = row(1)\n", "def go(oar):\n    row(1)\n"])
    def test_a_name_that_the_function_has_for_something_else_is_refused(self, tmp_path, source):
        edit = make_edit(scope="go", find="row(1)", replace="oar(1)", **{"import": "from lightning.pytorch import oar"})
        assert "'oar' is a variable there" in error(tmp_path, source, edit)

    def test_a_variable_elsewhere_is_no_matter(self, tmp_path):
        source = "from lightning import x\n\n\ndef stop():\n    oar = 1\n\n\ndef go():\n    row(1)\n"
        edit = make_edit(scope="go", find="row(1)", replace="oar(1)", **{"import": "from lightning.pytorch import oar"})
        assert "    oar(1)\n" in result(tmp_path, source, edit)


class TestWhatIsLeftOpen:
    @pytest.mark.parametrize(
        "find",
        [
            "self.row(...)",
            "self.row(2, ...)",
            "self.row(2, ..., ...)",
            "...(2, self.crew, hard=True)",
            "self.row(2, ..., hard=True)",
        ],
    )
    def test_expressions_and_the_rest_of_the_arguments(self, tmp_path, find):
        source = "def go(self):\n    self.row(2, self.crew, hard=True)\n    self.row.rest(1)\n"
        edit = make_edit(scope="go", find=find, replace="self.sail()")
        assert result(tmp_path, source, edit) == "def go(self):\n    self.sail()\n    self.row.rest(1)\n"

    @pytest.mark.parametrize(
        "find",
        [
            "self.row(..., 3)",
            "self.row(2, 3, 4, ...)",
            "self.row(3, ...)",
            "self.rest(...)",
            "self.row(2, ..., soft=True)",
        ],
    )
    def test_what_is_given_must_be_there(self, tmp_path, find):
        source = "def go(self):\n    self.row(2, self.crew, hard=True)\n"
        assert "matches no place" in error(tmp_path, source, make_edit(scope="go", find=find, replace="self.sail()"))

    def test_blocks_but_not_a_missing_one(self, tmp_path):
        source = "if wind:\n    sail()\n    rest()\nif wind:\n    sail()\nelse:\n    row()\n"
        edit = make_edit(find="if wind:\n    ...", replace="go()")
        assert result(tmp_path, source, edit) == "go()\nif wind:\n    sail()\nelse:\n    row()\n"

    def test_several_places_are_one_too_many(self, tmp_path):
        source = "row(1)\nrow(2)\n"
        assert "matches 2 places" in error(tmp_path, source, make_edit(find="row(...)", replace="sail()"))

    def test_what_is_wrapped_is_what_is_there(self, tmp_path):
        source = "def go(self):\n    way = self.row(2)  # slowly\n    return way\n"
        edit = make_edit(scope="go", find="way = self.row(...)", wrap="with self.oars(): ...")
        expected = "def go(self):\n    with self.oars():\n        way = self.row(2)  # slowly\n    return way\n"
        assert result(tmp_path, source, edit) == expected

    def test_a_wrapped_place_has_landed_whatever_it_is(self, tmp_path):
        source = "with oars():\n    row(2)\n"
        error(tmp_path, source, make_edit(find="row(...)", wrap="with oars(): ..."), kind=Landed)


class TestReplace:
    def test_a_statement_by_several_at_the_same_indentation(self, tmp_path):
        source = """
            class Boat:
                def go(self):
                    self.row()
                    self.rest()
        """
        edit = make_edit(
            scope="Boat.go", find="self.row()", replace="with self.oars():\n    self.row()\n\n    self.row()\n"
        )
        assert result(tmp_path, source, edit) == text("""
            class Boat:
                def go(self):
                    with self.oars():
                        self.row()

                        self.row()
                    self.rest()
        """)

    def test_several_consecutive_statements(self, tmp_path):
        assert result(tmp_path, "a()\nb()\nc()\n", make_edit(find="a()\nb()", replace="d()")) == "d()\nc()\n"

    def test_an_expression(self, tmp_path):
        assert result(tmp_path, "x = f(a.b, c)\n", make_edit(find="a.b", replace="a.b or d")) == "x = f(a.b or d, c)\n"

    def test_an_expression_in_parentheses_keeps_them(self, tmp_path):
        assert result(tmp_path, "x = (a + b) * c\n", make_edit(find="a + b", replace="a - b")) == "x = (a - b) * c\n"

    def test_formatting_of_the_source_makes_no_difference(self, tmp_path):
        source = "x = call(\n    'a',  # first\n    key = 1,\n)\n"
        assert result(tmp_path, source, make_edit(find='call("a", key=1)', replace="None")) == "x = None\n"

    def test_trailing_comment_is_kept(self, tmp_path):
        source = "def f():\n    a()  # why\n    # more\n    b()\n"
        edit = make_edit(scope="f", find="a()", replace="c()")
        assert result(tmp_path, source, edit) == "def f():\n    c()  # why\n    # more\n    b()\n"

    @pytest.mark.parametrize(
        "source",
        [
            "def f():\n    if x:\n        {}\n",
            "def f():\n    if x:\n        pass\n    else:\n        {}\n",
            "def f():\n    if x:\n        pass\n    elif y:\n        {}\n",
            "def f():\n    try:\n        {}\n    finally:\n        pass\n",
            "def f():\n    try:\n        pass\n    except OSError:\n        {}\n",
            "def f():\n    try:\n        pass\n    finally:\n        {}\n",
            "def f():\n    with x:\n        for y in z:\n            {}\n",
            "def f():\n    match x:\n        case 1:\n            {}\n",
            "@decorated\nasync def f():\n    async with x:\n        {}\n",
            "if x:\n    def f():\n        {}\n",
            "try:\n    import x\nexcept ImportError:\n    def f():\n        {}\n",
            "match x:\n    case 1:\n        def f():\n            {}\n",
        ],
    )
    def test_in_nested_blocks_and_scopes(self, tmp_path, source):
        edit = make_edit(scope="f", find="old()", replace="new()")
        assert result(tmp_path, source.format("old()"), edit) == source.format("new()")

    def test_nested_function_as_scope(self, tmp_path):
        source = "def f():\n    a()\n    def g():\n        a()\n"
        edit = make_edit(scope="f.g", find="a()", replace="b()")
        assert result(tmp_path, source, edit) == "def f():\n    a()\n    def g():\n        b()\n"

    def test_class_as_scope(self, tmp_path):
        source = "a = 1\nclass C:\n    a = 1\n"
        assert (
            result(tmp_path, source, make_edit(scope="C", find="a = 1", replace="a = 2"))
            == "a = 1\nclass C:\n    a = 2\n"
        )

    def test_text_after_characters_of_several_bytes(self, tmp_path):
        source = 'def f():\n    "ünïcödé 🚣"; x = "é", a, b  # naïve\n'
        edit = make_edit(scope="f", find="a", replace="'ø'")
        assert result(tmp_path, source, edit) == 'def f():\n    "ünïcödé 🚣"; x = "é", \'ø\', b  # naïve\n'

    def test_windows_line_ends_are_kept(self, tmp_path):
        source = b"from lightning.pytorch import sea\r\n\r\ndef f():\r\n    a()\r\n    b()\r\n    c()\r\n"
        edits = [
            make_edit(scope="f", find="a()", replace="with x:\n    a()"),
            make_edit(scope="f", find="b()", replace=""),
            make_edit(**{"import": "from lightning.pytorch import lake"}),
        ]
        assert result(tmp_path, source, *edits) == (
            "from lightning.pytorch import sea\r\nfrom lightning.pytorch import lake\r\n"
            "\r\ndef f():\r\n    with x:\r\n        a()\r\n    c()\r\n"
        )

    def test_indentation_by_tabs_is_kept(self, tmp_path):
        source = "class C:\n\tdef f(self):\n\t\ta()\n\t\tb()\n"
        edit = make_edit(scope="C.f", find="a()", replace="with x:\n    a()")
        assert result(tmp_path, source, edit) == "class C:\n\tdef f(self):\n\t\twith x:\n\t\t    a()\n\t\tb()\n"

    def test_decorated_function_is_replaced_with_its_decorators(self, tmp_path):
        source = "class C:\n    @one\n    @two(\n        3\n    )\n    def f(self): ...\n\n    x = 1\n"
        edit = make_edit(scope="C", find="@one\n@two(3)\ndef f(self): ...", replace="@four\ndef f(self):\n    g()")
        assert result(tmp_path, source, edit) == "class C:\n    @four\n    def f(self):\n        g()\n\n    x = 1\n"

    def test_statement_that_shares_its_line(self, tmp_path):
        assert (
            result(tmp_path, "if x: a()\n", make_edit(find="a()", replace="b(\n    1,\n)")) == "if x: b(\n    1,\n)\n"
        )

    def test_replacement_that_contains_what_it_replaces_elsewhere_in_the_scope(self, tmp_path):
        edit = make_edit(find="a()", replace="b(a())")
        assert result(tmp_path, "x = b(a())\ny = a()\n", edit) == "x = b(a())\ny = b(a())\n"

    def test_without_a_line_end_at_the_end_of_the_file(self, tmp_path):
        assert result(tmp_path, "a()", make_edit(find="a()", replace="b()\nc()")) == "b()\nc()"

    def test_no_match(self, tmp_path):
        edit = make_edit(scope="f", find="b()", replace="c()")
        assert "'b()' matches no place" in error(tmp_path, "b()\ndef f():\n    a()\n", edit)

    @pytest.mark.parametrize("source", ["a()\na()\n", "a()\nx = a()\n", "def f():\n    a()\ndef g():\n    a()\n"])
    def test_two_matches(self, tmp_path, source):
        assert "'a()' matches 2 places" in error(tmp_path, source, make_edit(find="a()", replace="b()"))

    def test_runs_of_statements_that_overlap_each_other_are_two_matches(self, tmp_path):
        edit = make_edit(find="a()\na()", replace="b()")
        assert "matches 2 places" in error(tmp_path, "a()\na()\na()\n", edit)

    def test_constants_of_different_types_do_not_match(self, tmp_path):
        assert "matches no place" in error(tmp_path, "x = True\n", make_edit(find="x = 1", replace="x = 2"))

    def test_nothing_inside_an_f_string_matches(self, tmp_path):
        source = 'x = f"{a} {b:{c}}"\n'
        assert "matches no place" in error(tmp_path, source, make_edit(find="a", replace="d"))

    def test_an_f_string_as_a_whole_matches(self, tmp_path):
        assert result(tmp_path, 'x = f"{a}"\n', make_edit(find='f"{a}"', replace="a")) == "x = a\n"

    @pytest.mark.parametrize(
        ("source", "find", "replace"),
        [
            ("x = a * c\n", "a", "a + b"),
            ("x = not a\n", "a", "a if b else c"),
            ("f((a, b))\n", "(a, b)", "c, d"),
            ("f(x for x in y)\n", "(x for x in y)", "list(y)"),
            ("x = a.b\n", "a", "-c"),
        ],
    )
    def test_expression_that_would_bind_differently(self, tmp_path, source, find, replace):
        assert "would mean something else" in error(tmp_path, source, make_edit(find=find, replace=replace))

    def test_expression_that_binds_differently_is_fine_in_parentheses(self, tmp_path):
        assert result(tmp_path, "x = a * c\n", make_edit(find="a", replace="(a + b)")) == "x = (a + b) * c\n"

    def test_statement_in_the_place_of_an_expression(self, tmp_path):
        assert "is no expression" in error(tmp_path, "x = a\n", make_edit(find="a", replace="return b"))

    def test_expression_cannot_be_removed(self, tmp_path):
        assert "is no expression" in error(tmp_path, "f(a)\n", make_edit(find="a", replace=""))

    def test_string_of_several_lines_that_indentation_would_change(self, tmp_path):
        edit = make_edit(scope="f", find="a()", replace='a("""one\ntwo""")')
        assert "would mean something else" in error(tmp_path, "def f():\n    a()\n", edit)

    def test_branch_that_would_cease_to_be_one(self, tmp_path):
        source = "if a:\n    b()\nelif c:\n    d()\n"
        edit = make_edit(find="if c:\n    d()", replace="if e:\n    d()")
        assert "would mean something else" in error(tmp_path, source, edit)

    def test_statement_after_a_semicolon_that_would_be_swallowed(self, tmp_path):
        edit = make_edit(find="a()", replace="with x:\n    a()")
        assert "would mean something else" in error(tmp_path, "a(); b()\n", edit)

    def test_block_on_the_line_of_its_condition(self, tmp_path):
        edit = make_edit(find="a()", replace="with x:\n    a()")
        assert "the result is not Python" in error(tmp_path, "if x: a()\n", edit)


class TestRemove:
    def test_statements_with_their_lines(self, tmp_path):
        source = "def f():\n    a()\n    b()  # gone as well\n    # stays\n    c()\n"
        assert result(tmp_path, source, make_edit(scope="f", find="a()\nb()", replace="")) == (
            "def f():\n    # stays\n    c()\n"
        )

    @pytest.mark.parametrize(
        ("source", "left"),
        [
            ("if x:\n    a()\n\n    b()\n", "if x:\n    b()\n"),
            ("b()\n\na()\n\nb()\n", "b()\n\nb()\n"),
            ("b()\na()\n\nb()\n", "b()\n\nb()\n"),
            ("b()\n\na()\nb()\n", "b()\n\nb()\n"),
            ("b()\r\n\r\na()\r\n\r\nb()\r\n", "b()\r\n\r\nb()\r\n"),
        ],
    )
    def test_blank_lines_neither_add_up_nor_open_a_block(self, tmp_path, source, left):
        assert result(tmp_path, source, make_edit(find="a()", replace="")) == left

    def test_decorated_function(self, tmp_path):
        assert result(tmp_path, "@a\ndef f(): ...\nb()\n", make_edit(find="@a\ndef f(): ...", replace="")) == "b()\n"

    @pytest.mark.parametrize("source", ["a(); b()\n", "b(); a()\n", "if x: a()\n"])
    def test_statement_that_shares_its_line(self, tmp_path, source):
        assert "lines for itself" in error(tmp_path, source, make_edit(find="a()", replace=""))

    def test_only_statement_of_a_block(self, tmp_path):
        assert "not Python" in error(tmp_path, "if x:\n    a()\n", make_edit(find="a()", replace=""))

    def test_two_edits_that_empty_a_block_together(self, tmp_path):
        edits = [make_edit(find=find, replace="") for find in ("a()", "b()")]
        assert "together they leave what is not Python" in error(tmp_path, "if x:\n    a()\n    b()\n", *edits)


class TestBeside:
    def test_statements_before_and_after_without_quoting_again(self, tmp_path):
        source = "def f():\n    # about a\n    a()  # why\n    b()\n"
        edits = [make_edit(scope="f", find="a()", before="x()\n\ny()"), make_edit(scope="f", find="b()", after="z()")]
        assert result(tmp_path, source, *edits) == (
            "def f():\n    # about a\n    x()\n\n    y()\n    a()  # why\n    b()\n    z()\n"
        )

    def test_both_around_the_same_statement(self, tmp_path):
        edits = [make_edit(find="a()", after="z()"), make_edit(find="a()", before="x()")]
        assert result(tmp_path, "if c:\n    a()\n", *edits) == "if c:\n    x()\n    a()\n    z()\n"

    def test_several_statements(self, tmp_path):
        edits = [make_edit(find="a()\nb()", before="x()"), make_edit(find="a()\nb()", after="y()")]
        assert result(tmp_path, "a()\nb()", *edits) == "x()\na()\nb()\ny()"

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("r = g(a)\n", "x()\nr = g(a)\ny()\n"),
            ("if a:\n    return_()\n", "x()\nif a:\n    return_()\ny()\n"),
            ("for i in j:\n    g(\n        a\n    )\n", "for i in j:\n    x()\n    g(\n        a\n    )\n    y()\n"),
            ("@a\ndef g(): ...\n", "x()\n@a\ndef g(): ...\ny()\n"),
        ],
    )
    def test_an_expression_stands_for_the_innermost_statement_around_it(self, tmp_path, source, expected):
        edits = [make_edit(find="a", before="x()"), make_edit(find="a", after="y()")]
        assert result(tmp_path, source, *edits) == expected

    def test_windows_line_ends_and_tabs_are_kept(self, tmp_path):
        edits = [make_edit(find="a()", before="x()"), make_edit(find="a()", after="y()")]
        source = b"if c:\r\n\ta()  # why\r\n"
        assert result(tmp_path, source, *edits) == "if c:\r\n\tx()\r\n\ta()  # why\r\n\ty()\r\n"

    def test_beside_what_another_edit_replaces_or_wraps(self, tmp_path):
        edits = [
            make_edit(find="a()", wrap="with c: ..."),
            make_edit(find="a()", after="y()"),
            make_edit(find="b(1)", before="x()"),
            make_edit(find="1", replace="2"),
        ]
        assert result(tmp_path, "a()\nb(1)\n", *edits) == "with c:\n    a()\ny()\nx()\nb(2)\n"

    @pytest.mark.parametrize(
        ("source", "kind"), [("a(); b()\n", "after"), ("if c: a()\n", "after"), ("b(); a()\n", "before")]
    )
    def test_statement_that_shares_its_line(self, tmp_path, source, kind):
        message = error(tmp_path, source, make_edit(find="a()", **{kind: "with x:\n    z()"}))
        assert "would mean something else" in message or "the result is not Python" in message

    def test_branch_of_a_condition(self, tmp_path):
        source = "if c:\n    b()\nelif a:\n    d()\n"
        assert "not Python" in error(tmp_path, source, make_edit(find="a", before="x()"))

    @pytest.mark.parametrize("kind", ["before", "after"])
    def test_nothing(self, tmp_path, kind):
        assert "says nothing" in error(tmp_path, "a()\n", make_edit(find="a()", **{kind: "# only a comment"}))

    @pytest.mark.parametrize("kind", ["before", "after"])
    def test_there_already(self, tmp_path, kind):
        edit = make_edit(scope="f", find="a()", **{kind: "x()"})
        source = "def f():\n    x()\n    a()\n    x()\n"
        assert "is there already" in error(tmp_path, source, edit, kind=Landed)

    def test_no_match(self, tmp_path):
        assert "matches no place" in error(tmp_path, "a()\n", make_edit(find="b()", after="x()"), kind=NoMatch)


class TestWrap:
    @pytest.mark.parametrize("text", ["with x as y: ...", "with x as y:\n    ..."])
    def test_statement(self, tmp_path, text):
        source = "def f():\n    a(\n        1,  # one\n    )  # why\n    b()\n"
        assert result(tmp_path, source, make_edit(scope="f", find="a(1)", wrap=text)) == (
            "def f():\n    with x as y:\n        a(\n            1,  # one\n        )  # why\n    b()\n"
        )

    def test_several_statements_with_what_comes_before_and_after_them(self, tmp_path):
        edit = make_edit(find="a()\n\nb()", wrap="try:\n    ...\nexcept OSError:\n    c()\nd()")
        expected = "if z:\n    try:\n        a()\n\n        b()\n    except OSError:\n        c()\n    d()\n"
        assert result(tmp_path, "if z:\n    a()\n\n    b()\n", edit) == expected

    def test_expression(self, tmp_path):
        source = "x = g(\n    a.b('s'),  # why\n    c,\n)\n"
        assert result(tmp_path, source, make_edit(find='a.b("s")', wrap="h(..., 1)")) == (
            "x = g(\n    h(a.b('s'), 1),  # why\n    c,\n)\n"
        )

    def test_call_that_is_a_statement_as_an_expression(self, tmp_path):
        assert result(tmp_path, "a()\n", make_edit(find="a()", wrap="x = f(...)")) == "x = f(a())\n"

    def test_windows_line_ends_are_kept(self, tmp_path):
        edit = make_edit(find="a(1)", wrap="with x: ...")
        assert result(tmp_path, b"a(\r\n    1)\r\n", edit) == "with x:\r\n    a(\r\n        1)\r\n"

    def test_decorated_function(self, tmp_path):
        edit = make_edit(find="@a\ndef f(): b()", wrap="if x: ...")
        assert result(tmp_path, "@a\ndef f():\n    b()\n", edit) == "if x:\n    @a\n    def f():\n        b()\n"

    @pytest.mark.parametrize("text", ["with x: pass", "f(..., ...)", "# ...", "f('...')"])
    def test_other_than_one_place_for_what_is_found(self, tmp_path, text):
        assert "needs exactly one '...'" in error(tmp_path, "a()\n", make_edit(find="a()", wrap=text))

    def test_statements_in_the_place_of_an_expression(self, tmp_path):
        assert "wraps statements" in error(tmp_path, "a = 1\n", make_edit(find="a = 1", wrap="f(...)"))

    def test_expression_in_the_place_of_statements(self, tmp_path):
        assert "is no expression" in error(tmp_path, "b = a\n", make_edit(find="a", wrap="with x: ..."))

    def test_string_of_several_lines_that_indentation_would_change(self, tmp_path):
        source = 'a("""one\ntwo""")\n'
        edit = make_edit(find=source, wrap="with x: ...")
        assert "would mean something else" in error(tmp_path, source, edit)

    @pytest.mark.parametrize("text", ["with x: ...", "f(...)"])
    def test_there_already(self, tmp_path, text):
        tree = write_tree(tmp_path / "first", "def f():\n    a()\n")
        edit = make_edit(scope="f", find="a()", wrap=text)
        apply_patches(tree, [make_patch(edit)])
        assert "is there already" in error(tmp_path, (tree / FILE).read_text(), edit, kind=Landed)


class TestBody:
    def test_signature_decorators_and_docstring_are_kept(self, tmp_path):
        source = '''
            class Boat:
                @fast
                async def go(
                    self,
                    # how far
                    miles,
                ):  # noqa
                    """Goes.

                    # Not a comment.
                    """

                    x = 1
                    return x

                y = 2
        '''
        edit = make_edit(scope="Boat.go", body="return await fly(\n    miles\n)")
        assert result(tmp_path, source, edit) == text('''
            class Boat:
                @fast
                async def go(
                    self,
                    # how far
                    miles,
                ):  # noqa
                    """Goes.

                    # Not a comment.
                    """

                    return await fly(
                        miles
                    )

                y = 2
        ''')

    def test_comments_of_the_old_body_go(self, tmp_path):
        source = "def f(\n    # kept\n):\n  # short\n\n    # about a\n    a()\n    b()  # about b\n\nc()  # kept\n"
        assert (
            result(tmp_path, source, make_edit(scope="f", body="d()"))
            == "def f(\n    # kept\n):\n    d()\n\nc()  # kept\n"
        )

    def test_function_on_one_line(self, tmp_path):
        assert result(tmp_path, "def f(): return 1\n", make_edit(scope="f", body="return 2")) == "def f(): return 2\n"

    def test_first_statement_is_a_decorated_function(self, tmp_path):
        source = "def f():\n    @a\n    def g(): ...\n    return g\n"
        assert result(tmp_path, source, make_edit(scope="f", body="return h")) == "def f():\n    return h\n"

    @pytest.mark.parametrize("scope", ["C", None])
    def test_needs_a_function(self, tmp_path, scope):
        assert "needs a function" in error(tmp_path, "class C:\n    a()\n", make_edit(scope=scope, body="b()"))

    def test_function_with_nothing_but_a_docstring(self, tmp_path):
        assert "no body beside its docstring" in error(
            tmp_path, 'def f():\n    "Text."\n', make_edit(scope="f", body="b()")
        )

    def test_without_a_statement(self, tmp_path):
        edit = make_edit(scope="f", body="# nothing")
        assert "not Python" in error(tmp_path, "def f():\n    a()\n", edit)

    def test_that_becomes_a_docstring_on_indentation_only(self, tmp_path):
        edit = make_edit(scope="f", body='return """one\ntwo"""')
        assert "would mean something else" in error(tmp_path, "def f():\n    a()\n", edit)


class TestImport:
    SOURCE = text("""
        import os
        from lightning.fabric.utilities import (
            knots,
        )
        from lightning.pytorch import sea
        from torch import nn

        x = 1
    """)

    @pytest.mark.parametrize(
        ("new", "before"),
        [
            ("from lightning.fabric import boat", "from lightning.fabric.utilities"),
            ("from lightning.fabric.utilities import ropes as r", "from lightning.pytorch"),
            ("from lightning.zebra import z", "from torch"),
            ("from torch.nn import functional", "\nx = 1"),
        ],
    )
    def test_where_sorting_puts_it(self, tmp_path, new, before):
        assert result(tmp_path, self.SOURCE, make_edit(**{"import": new})) == self.SOURCE.replace(
            before, f"{new}\n{before}"
        )

    @pytest.mark.parametrize("new", ["from torch import nn", "from lightning.pytorch import sky, sea as ocean"])
    def test_that_is_there_already(self, tmp_path, new):
        source = self.SOURCE.replace("import sea", "import sea as ocean, land\nfrom lightning.pytorch import sky")
        assert result(tmp_path, source, make_edit(**{"import": new})) == source

    def test_under_another_name_is_not_there_already(self, tmp_path):
        edit = make_edit(**{"import": "from torch import nn as n"})
        assert result(tmp_path, self.SOURCE, edit).count("import nn") == 2

    def test_same_import_of_two_patches_is_made_once(self, tmp_path):
        tree = write_tree(tmp_path, self.SOURCE)
        edits = [make_edit(name, **{"import": "from lightning.pytorch import sky"}) for name in ("row", "sail")]
        touched = apply_patches(tree, [make_patch(edit, name=edit.patch) for edit in edits])
        assert touched == {tree / FILE: ["row", "sail"]}
        assert (tree / FILE).read_text().count("sky") == 1

    def test_names_that_several_edits_import_from_one_module_stand_together(self, tmp_path):
        texts = ["from torch.z import z, Z", "from torch.z import b as a", "from torch.z import nn"]
        edits = [make_edit(**{"import": text}) for text in texts]
        source = "from torch.z import nn\n"
        assert result(tmp_path, source, *edits) == "from torch.z import nn\nfrom torch.z import Z, b as a, z\n"

    def test_line_that_would_be_too_long_is_wrapped(self, tmp_path):
        names = [letter * 40 for letter in "abc"]
        edit = make_edit(**{"import": f"from torch.z import {', '.join(names)}"})
        lines = "".join(f"    {name},\n" for name in names)
        assert result(tmp_path, "from torch import nn\n", edit) == (
            f"from torch import nn\nfrom torch.z import (\n{lines})\n"
        )

    def test_of_a_patch_that_changes_something_else_too(self, tmp_path):
        source = "from torch import nn\n\ndef f():\n    a()\n"
        two = "from torch.y import y\nfrom torch.z import z"
        edits = [
            make_edit(scope="f", find="a()", replace="y(z)", **{"import": two}),
            make_edit(scope="f", find="a()", before="y()", **{"import": "from torch.y import y"}),
        ]
        assert result(tmp_path, source, *edits) == (
            "from torch import nn\nfrom torch.y import y\nfrom torch.z import z\n\ndef f():\n    y()\n    y(z)\n"
        )

    def test_no_import_of_the_package_to_stand_beside(self, tmp_path):
        edit = make_edit(**{"import": "from numpy import array"})
        assert "imports nothing from 'numpy'" in error(tmp_path, self.SOURCE, edit)

    @pytest.mark.parametrize(
        "new", ["import lightning", "from . import x", "from .torch import x", "x = 1", "from torch import nn\nc()"]
    )
    def test_other_than_absolute_from_imports(self, tmp_path, new):
        assert "is not an absolute" in error(tmp_path, self.SOURCE, make_edit(**{"import": new}))

    def test_beside_a_statement_on_the_same_line(self, tmp_path):
        edit = make_edit(**{"import": "from torch import a"})
        assert "the result is not Python" in error(tmp_path, "from torch import nn", edit)


class TestOrphanedImports:
    """Imports that something used before the edits, and nothing after them."""

    @pytest.mark.parametrize(
        ("imports", "left"),
        [
            ("import a\nimport os\n", "import os\n"),
            ("import a.b\nimport os\n", "import os\n"),
            ("import os, a\n", "import os\n"),
            ("import b as a\nimport os\n", "import os\n"),
            ("from x import a\nimport os\n", "import os\n"),
            ("from x import a, os\n", "from x import os\n"),
            ("from x import (\n    a,\n    os,\n)\n", "from x import (\n    os,\n)\n"),
            ("from x import b as a, os  # why\n", "from x import os  # why\n"),
        ],
    )
    def test_are_dropped(self, tmp_path, imports, left):
        edit = make_edit(scope="f", find="a.b()", replace="os.c()")
        code = "\ndef f():\n    os.d()\n    {}()\n"
        assert result(tmp_path, imports + code.format("a.b"), edit) == left + code.format("os.c")

    def test_that_several_edits_orphan_together(self, tmp_path):
        source = "import a\nimport b\n\nx = a.b\ny = a.c\n"
        edits = [make_edit(find="a.b", replace="1"), make_edit(find="a.c", replace="b")]
        assert result(tmp_path, source, *edits) == "import b\n\nx = 1\ny = b\n"
        tree = write_tree(tmp_path / "other", source)
        apply_patches(tree, [make_patch(edits[0])])
        assert (tree / FILE).read_text() == "import a\nimport b\n\nx = 1\ny = a.c\n"

    def test_of_a_function_are_dropped_there(self, tmp_path):
        source = "from x import a\n\ndef f():\n    from y import a, b\n    a()\n    b()\n\ndef g():\n    a()\n"
        assert result(tmp_path, source, make_edit(scope="f", find="a()", replace="")) == (
            "from x import a\n\ndef f():\n    from y import b\n    b()\n\ndef g():\n    a()\n"
        )

    @pytest.mark.parametrize(
        "use",
        [
            "a()",
            "def g(x: 'a.b'): ...",
            "def g() -> 'list[a]': ...",
            "x: 'a' = 1",
            "x = cast('a', 1)",
            "__all__ = ['a']",
            "x = f'{a}'",
            'def g():\n    """Text.\n\n    >>> a()\n    """',
            'def g():\n    """Text.\n\n    >>> if x:\n    ...     a()\n    """',
        ],
    )
    def test_are_kept_where_something_else_uses_the_name(self, tmp_path, use):
        source = f"import a\n\nx = a(1)\n\n{use}\n"
        edit = make_edit(find="a(1)", replace="2")
        assert result(tmp_path, source, edit) == source.replace("a(1)", "2")

    def test_are_dropped_although_a_text_contains_the_name(self, tmp_path):
        source = 'import a\n\nx = a(1)\n"""Is a word."""\n'
        edit = make_edit(find="a(1)", replace="2")
        assert result(tmp_path, source, edit) == source.replace("a(1)", "2").replace("import a\n\n", "")

    def test_are_kept_if_nothing_used_them_before(self, tmp_path):
        source = "import a\nfrom b import c\n\nx = 1\n"
        assert result(tmp_path, source, make_edit(find="1", replace="2")) == source.replace("1", "2")

    @pytest.mark.parametrize(
        "block", ["if TYPE_CHECKING:\n    {}\n", "try:\n    {}\nexcept ImportError:\n    a = None\n"]
    )
    def test_are_kept_below_a_condition(self, tmp_path, block):
        source = block.format("import a") + "x = a(1)\n"
        assert result(tmp_path, source, make_edit(find="a(1)", replace="2")) == source.replace("a(1)", "2")

    @pytest.mark.parametrize(
        "text",
        [
            "from lightning.pytorch.boat import a\n",
            "from lightning.pytorch.boat import (\n    b,\n    a as c,\n)\n",
        ],
    )
    def test_are_kept_where_another_module_has_the_name_from_here(self, tmp_path, text):
        source = "import a\nimport b\n\nx = g(a, b)\n"
        tree = write_tree(tmp_path, source)
        (tree / "lightning/fabric/other.py").write_text(text)
        apply_patches(tree, [make_patch(make_edit(find="g(a, b)", replace="b"))])
        assert (tree / FILE).read_text() == source.replace("g(a, b)", "b")

    def test_are_found_in_the_other_distribution(self, tmp_path):
        (tmp_path / "lightning_fabric").mkdir()
        (tmp_path / "pytorch_lightning").mkdir()
        file = tmp_path / "pytorch_lightning/boat.py"
        file.write_text("import a\nimport b\n\nx = g(a, b)\n")
        (tmp_path / "lightning_fabric/other.py").write_text("from pytorch_lightning.boat import a\n")
        apply_patches(tmp_path, [make_patch(make_edit(find="g(a, b)", replace="0"))])
        assert file.read_text() == "import a\n\nx = 0\n"


class TestScope:
    @pytest.mark.parametrize("scope", ["g", "C.g", "C.f.g", "D.f"])
    def test_missing(self, tmp_path, scope):
        edit = make_edit(scope=scope, find="a()", replace="b()")
        assert "no definitions of" in error(tmp_path, "class C:\n    def f(self):\n        a()\n", edit)

    def test_ambiguous(self, tmp_path):
        source = "class C:\n    if x:\n        def f(self): a()\n    else:\n        def f(self): a()\n"
        edit = make_edit(scope="C.f", find="a()", replace="b()")
        assert "2 definitions of 'f'" in error(tmp_path, source, edit)

    def test_a_property_and_its_setter(self, tmp_path):
        source = "class C:\n    @property\n    def f(self): a()\n    @f.setter\n    def f(self, x): a()\n"
        edits = [make_edit(scope="C.f", body="b()"), make_edit(scope="C.f.setter", find="a()", replace="c()")]
        assert result(tmp_path, source, *edits) == (
            "class C:\n    @property\n    def f(self): b()\n    @f.setter\n    def f(self, x): c()\n"
        )

    def test_missing_file(self, tmp_path):
        edit = make_edit(file="lightning/pytorch/raft.py", find="a()", replace="b()")
        assert "the file does not exist" in error(tmp_path, "a()\n", edit)


class TestLanded:
    def test_replacement_is_there_already(self, tmp_path):
        edit = make_edit(scope="f", find="a()", replace="b()")
        assert "it landed upstream (then drop it)" in error(tmp_path, "def f():\n    b()\n", edit, kind=Landed)

    def test_replacement_that_contains_what_it_replaces(self, tmp_path):
        edit = make_edit(find="a()", replace="with x:\n    a()")
        assert "the replacement is there already" in error(tmp_path, "with x:\n    a()\n", edit, kind=Landed)

    def test_in_another_form(self, tmp_path):
        edit = make_edit(scope="f", find="a()", landed='profile("a")', replace="with self.x.profile('a'):\n    a()")
        source = "def f():\n    with self.other.way.profile('a') as p:\n        a()\n"
        assert "landed upstream" in error(tmp_path, source, edit, kind=Landed)

    def test_mark_elsewhere_does_not_count(self, tmp_path):
        edit = make_edit(scope="f", find="a()", landed="mark()", replace="b()")
        assert result(tmp_path, "mark()\ndef f():\n    a()\n", edit) == "mark()\ndef f():\n    b()\n"

    def test_body_is_there_already(self, tmp_path):
        source = 'def f():\n    "Text."\n    return g(  1  )\n'
        assert "has this body already" in error(tmp_path, source, make_edit(scope="f", body="return g(1)"), kind=Landed)

    def test_applying_a_second_time(self, tmp_path):
        tree = write_tree(tmp_path, "a()\n")
        patches = [make_patch(make_edit(find="a()", replace="with x:\n    a()"))]
        apply_patches(tree, patches)
        with pytest.raises(Landed):
            apply_patches(tree, patches)


class TestNotPython:
    @pytest.mark.parametrize("key", ["find", "replace", "landed"])
    def test_text_of_a_replacement(self, tmp_path, key):
        spec = {"find": "a()", "replace": "b()", "landed": "c()"} | {key: "a("}
        assert "'a(' is not Python" in error(tmp_path, "a()\n", make_edit(**spec))

    @pytest.mark.parametrize(("kind", "scope"), [("body", "f"), ("import", None)])
    def test_text_of_another_edit(self, tmp_path, kind, scope):
        edit = make_edit(scope=scope, **{kind: "a ("})
        assert "'a (' is not Python" in error(tmp_path, "def f():\n    a()\n", edit)

    def test_file_of_the_tree(self, tmp_path):
        assert "the file is not Python" in error(tmp_path, "a(\n", make_edit(find="a", replace="b"))


class TestSeveralPatches:
    @pytest.mark.parametrize(
        ("one", "two"),
        [
            ({"find": "a()", "replace": "c()"}, {"find": "a()", "replace": "d()"}),
            ({"find": "a()\nb()", "replace": "c()"}, {"find": "b()", "replace": "d()"}),
            ({"find": "g(x)", "replace": "c()"}, {"find": "x", "replace": "y"}),
            ({"find": "x", "replace": "y"}, {"find": "g(x)", "replace": "c()"}),
            ({"body": "c()"}, {"find": "x", "replace": "y"}),
            ({"find": "x", "replace": "y"}, {"find": "if z:\n    g(x)", "replace": ""}),
            ({"find": "x", "wrap": "f(...)"}, {"find": "g(x)", "wrap": "with y: ..."}),
            ({"body": "c()"}, {"find": "a()", "after": "d()"}),
        ],
    )
    def test_edits_that_overlap(self, tmp_path, one, two):
        source = "def f():\n    a()\n    b()\n    if z:\n        g(x)\n"
        tree = write_tree(tmp_path, source)
        patches = [
            make_patch(make_edit(name, scope="f", **spec), name=name) for name, spec in (("row", one), ("sail", two))
        ]
        with pytest.raises(PatchError, match=r"patch 'sail'.*scope 'f': overlaps an edit of patch 'row'"):
            apply_patches(tree, patches)
        assert (tree / FILE).read_text() == source

    @pytest.mark.parametrize("kind", ["before", "after"])
    def test_edits_that_insert_at_the_same_place(self, tmp_path, kind):
        tree = write_tree(tmp_path, "a()\n")
        edits = [make_edit(name, find="a()", **{kind: f"{name}()"}) for name in ("row", "sail")]
        with pytest.raises(PatchError, match=r"patch 'sail'.*inserts at the same place as an edit of patch 'row'"):
            apply_patches(tree, [make_patch(edit, name=edit.patch) for edit in edits])

    def test_order_makes_no_difference(self, tmp_path):
        source = "from torch import nn\n\n\ndef f():\n    # first\n    a(x)\n    b()\n\n\ndef g():\n    return 1\n"
        edits = [
            make_edit("body", scope="g", body="return 2\n"),
            make_edit("expression", scope="f", find="x", replace="y"),
            make_edit("statement", scope="f", find="b()", replace="a(x)\nc()"),
            make_edit("import-z", **{"import": "from torch.z import z"}),
            make_edit("import-y", **{"import": "from torch.y import y"}),
        ]
        patches = [make_patch(edit, name=edit.patch) for edit in edits]
        results = set()
        for number, order in enumerate(itertools.permutations(patches)):
            tree = write_tree(tmp_path / str(number), source)
            apply_patches(tree, order)
            results.add((tree / FILE).read_text())
        assert results == {
            "from torch import nn\nfrom torch.y import y\nfrom torch.z import z\n\n\n"
            "def f():\n    # first\n    a(y)\n    a(x)\n    c()\n\n\ndef g():\n    return 2\n"
        }

    def test_touched_files_name_their_patches(self, tmp_path):
        tree = write_tree(tmp_path, "a()\nb()\n")
        names = {"row": "a()", "sail": "b()"}
        patches = [make_patch(make_edit(name, find=find, replace="c()"), name=name) for name, find in names.items()]
        assert apply_patches(tree, patches) == {tree / FILE: ["row", "sail"]}


class TestAddedModules:
    @pytest.fixture
    def repository(self, tmp_path, monkeypatch):
        folder = tmp_path / "repository"
        for name in ("boat", "new/raft"):
            path = folder / f"src/lightning/pytorch/{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("from lightning.pytorch import sea\n")
        monkeypatch.setattr(layout_module, "REPOSITORY", folder)
        return folder

    def test_new_and_replaced_files(self, tmp_path, repository):
        tree = write_tree(tmp_path / "tree", "a()\n")
        adds = ["src/lightning/pytorch/boat.py", "src/lightning/pytorch/new/raft.py", "tests/pytorch/test_raft.py"]
        assert apply_patches(tree, [make_patch(adds=adds)]) == {tree / FILE: ["row"]}
        assert (tree / FILE).read_text() == "from lightning.pytorch import sea\n"
        assert (tree / "lightning/pytorch/new/raft.py").is_file()
        assert not (tree / "tests").exists()

    def test_file_that_is_replaced_and_edited(self, tmp_path, repository):
        tree = write_tree(tmp_path / "tree", "a()\n")
        one = make_patch(make_edit("sail", find="a()", replace="b()"), name="sail")
        two = make_patch(adds=["src/lightning/pytorch/boat.py"])
        for patches in ([one, two], [two, one]):
            with pytest.raises(PatchError, match=r"patch 'sail', file .*boat.py.*patch 'row' replaces the whole file"):
                apply_patches(tree, patches)
        assert (tree / FILE).read_text() == "a()\n"

    def test_module_that_two_patches_add(self, tmp_path, repository):
        tree = write_tree(tmp_path / "tree", "a()\n")
        patches = [make_patch(name=name, adds=["src/lightning/pytorch/boat.py"]) for name in ("row", "sail")]
        with pytest.raises(PatchError, match=r"'row' and 'sail' both add 'boat.py'"):
            apply_patches(tree, patches)

    def test_module_that_does_not_exist(self, tmp_path, repository):
        tree = write_tree(tmp_path / "tree", "a()\n")
        with pytest.raises(PatchError, match=r"'row' adds 'src/lightning/pytorch/ship.py', which does not exist"):
            apply_patches(tree, [make_patch(adds=["src/lightning/pytorch/ship.py"])])

    def test_imports_are_renamed_for_the_other_distribution(self, tmp_path, repository):
        tree = tmp_path / "tree"
        (tree / "lightning_fabric").mkdir(parents=True)
        apply_patches(tree, [make_patch(adds=["src/lightning/pytorch/new/raft.py"])])
        assert (tree / "pytorch_lightning/new/raft.py").read_text() == "from pytorch_lightning import sea\n"


class TestLayout:
    EDIT = make_edit(scope="f", find="lightning.pytorch.old()", replace="lightning.fabric.new('lightning.pytorch.x')")

    def test_other_distribution(self, tmp_path):
        (tmp_path / "lightning_fabric").mkdir()
        (tmp_path / "pytorch_lightning").mkdir()
        file = tmp_path / "pytorch_lightning/boat.py"
        file.write_text("from pytorch_lightning import old\n\ndef f():\n    pytorch_lightning.old()\n")
        new_import = make_edit(**{"import": "from lightning.pytorch.z import z"})
        assert apply_patches(tmp_path, [make_patch(self.EDIT, new_import)]) == {file: ["row"]}
        assert file.read_text() == (
            "from pytorch_lightning import old\nfrom pytorch_lightning.z import z\n\n"
            "def f():\n    lightning_fabric.new('pytorch_lightning.x')\n"
        )

    def test_files_of_the_package_lightning_itself_are_passed_over_in_the_other_distribution(self, tmp_path):
        edits = [make_edit(file=file, find="a()", replace="b()") for file in ("lightning/__init__.py", FILE)]
        for tree, fabric in ((tmp_path / "lightning", "lightning/fabric"), (tmp_path / "other", "lightning_fabric")):
            (tree / fabric).mkdir(parents=True)
            Layout(tree).path(FILE).parent.mkdir(exist_ok=True)
            Layout(tree).path(FILE).write_text("a()\n")
        with pytest.raises(PatchError, match=r"lightning/__init__\.py.*does not exist"):
            apply_patches(tmp_path / "lightning", [make_patch(*edits)])
        patch = make_patch(*edits)
        apply_patches(tmp_path / "other", [patch])
        assert (tmp_path / "other/pytorch_lightning/boat.py").read_text() == "b()\n"
        assert judge(Layout(tmp_path / "other"), patch) == Status("landed")

    def test_checkout_is_not_renamed_although_it_has_the_folders_of_the_other_distribution(self, tmp_path):
        write_tree(tmp_path / "src", "def f():\n    lightning.pytorch.old()\n")
        for name in ("lightning_fabric", "pytorch_lightning"):
            (tmp_path / "src" / name).mkdir()
        apply_patches(tmp_path, [make_patch(self.EDIT)])
        assert (tmp_path / "src" / FILE).read_text() == "def f():\n    lightning.fabric.new('lightning.pytorch.x')\n"

    def test_neither(self, tmp_path):
        with pytest.raises(PatchError, match="neither a checkout of Lightning nor an unpacked wheel"):
            Layout(tmp_path)

    @pytest.mark.parametrize(
        ("text", "renamed"),
        [
            ("import lightning.pytorch as pl", "import pytorch_lightning as pl"),
            ("from lightning.fabric.utilities import x", "from lightning_fabric.utilities import x"),
            ("lightning/fabric/utilities/x.py", "lightning_fabric/utilities/x.py"),
            ("lightning/pytorch", "pytorch_lightning"),
            ("my.lightning.pytorch", "my.lightning.pytorch"),
            ("lightning.pytorch_extras", "lightning.pytorch_extras"),
            ("src/lightning/pytorch", "src/lightning/pytorch"),
        ],
    )
    def test_rename(self, text, renamed):
        assert rename(text) == renamed


HEADER: dict[str, Any] = {
    "subject": "Row",
    "why": "Faster.",
    "upstream": "own",
    "drop": "never",
    "tests": [],
    "adds": [],
    "requires": [],
}
EDIT = '[[edit]]\nfile = "lightning/x.py"\nfind = "a"\nreplace = "b"\n'


def write_patch(folder: Path, name: str, edits: str = EDIT, **header: Any) -> None:
    values = {key: value for key, value in (HEADER | header).items() if value is not None}
    lines = [f"{key} = {value!r}" for key, value in values.items()]
    (folder / f"{name}.toml").write_text("\n".join([*lines, edits]), encoding="utf-8")


class TestFormat:
    def test_everything_is_read(self, tmp_path):
        write_patch(tmp_path, "row", edits=EDIT + EDIT.replace('"a"', '"c"'), tests=["tests/x.py"], why="Fäster.")
        (patch,) = load_patches(tmp_path)
        assert (patch.name, patch.subject, patch.why, patch.tests) == ("row", "Row", "Fäster.", ["tests/x.py"])
        assert [edit.patch for edit in patch.edits] == ["row", "row"]

    @pytest.mark.parametrize("key", HEADER)
    @pytest.mark.parametrize("value", [None, 1, "", [1]])
    def test_header_key_that_is_missing_or_of_the_wrong_kind(self, tmp_path, key, value):
        write_patch(tmp_path, "row", **{key: value})
        with pytest.raises(PatchError, match=f"row.toml: needs '{key}', a "):
            load_patches(tmp_path)

    def test_header_key_that_is_unknown(self, tmp_path):
        write_patch(tmp_path, "row", author="me")
        with pytest.raises(PatchError, match=r"row.toml: unknown key 'author'"):
            load_patches(tmp_path)

    def test_not_toml(self, tmp_path):
        (tmp_path / "row.toml").write_text("subject = \n")
        with pytest.raises(PatchError, match=r"row.toml: Invalid"):
            load_patches(tmp_path)

    def test_added_file_outside_of_the_two_folders(self, tmp_path):
        write_patch(tmp_path, "row", adds=["lightning/x.py"])
        with pytest.raises(PatchError, match=r"adds 'lightning/x.py', which is neither below"):
            load_patches(tmp_path)

    def test_neither_edits_nor_adds(self, tmp_path):
        write_patch(tmp_path, "row", edits="")
        with pytest.raises(PatchError, match="neither edits nor adds anything"):
            load_patches(tmp_path)

    @pytest.mark.parametrize("edits", ["edit = 'x'", "edit = ['x']", '[edit]\nfile = "x"\n'])
    def test_edits_that_are_no_list_of_tables(self, tmp_path, edits):
        write_patch(tmp_path, "row", edits=edits)
        with pytest.raises(PatchError, match=r"row.toml: write \[\[edit\]\]"):
            load_patches(tmp_path)

    @pytest.mark.parametrize(
        "keys",
        [
            ["find", "replace"],
            ["file"],
            ["file", "find"],
            ["file", "replace"],
            ["file", "find", "replace", "body"],
            ["file", "find", "replace", "within"],
            ["find", "replace", "import"],
            ["file", "find", "replace", "after"],
            ["file", "wrap"],
            ["file", "before"],
            ["file", "import", "in"],
            ["file", "import", "landed"],
        ],
    )
    def test_edit_with_other_keys(self, tmp_path, keys):
        write_patch(tmp_path, "row", edits="\n".join(["[[edit]]", *(f"{key} = 'x'" for key in keys)]))
        with pytest.raises(PatchError, match=r"row.toml: an edit has the keys .* it needs"):
            load_patches(tmp_path)

    def test_edit_with_a_value_that_is_no_string(self, tmp_path):
        write_patch(tmp_path, "row", edits=EDIT.replace('"a"', "1"))
        with pytest.raises(PatchError, match=r"row.toml: 'find' of an edit must be a string"):
            load_patches(tmp_path)

    @pytest.mark.parametrize("kind", ["replace", "before", "after", "wrap"])
    def test_edit_with_an_import_beside(self, tmp_path, kind):
        write_patch(tmp_path, "row", edits=EDIT.replace("replace", kind) + 'import = "from a import b"\nin = "f"\n')
        assert load_patches(tmp_path)[0].edits[0].spec.keys() == {"file", "in", "find", kind, "import"}

    def test_what_a_patch_requires_comes_first(self, tmp_path):
        write_patch(tmp_path, "a", requires=["c"])
        write_patch(tmp_path, "b")
        write_patch(tmp_path, "c", requires=["d"])
        write_patch(tmp_path, "d")
        patches = load_patches(tmp_path)
        assert [patch.name for patch in patches] == ["d", "c", "a", "b"]
        assert [patch.name for patch in select(patches, ["b", "c"])] == ["b", "d", "c"]

    def test_circle(self, tmp_path):
        write_patch(tmp_path, "a", requires=["b"])
        write_patch(tmp_path, "b", requires=["a"])
        with pytest.raises(PatchError, match="circle: a -> b -> a"):
            load_patches(tmp_path)

    def test_unknown_requirement(self, tmp_path):
        write_patch(tmp_path, "a", requires=["c"])
        with pytest.raises(PatchError, match=r"no patch 'c' .required by 'a'.; there are: a"):
            load_patches(tmp_path)

    def test_unknown_name(self, tmp_path):
        write_patch(tmp_path, "a")
        with pytest.raises(PatchError, match=r"no patch 'b' .asked for.; there are: a"):
            select(load_patches(tmp_path), ["b"])
