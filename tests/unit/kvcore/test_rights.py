"""Rights: sets of names, roles of roles, records, and what a change makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.dbfront.statement.rights_change import (
    changed_rights,
    with_owner_changed,
    with_tables_moved,
)
from tierkv.dbfront.views.admin import visible_rows
from tierkv.kvcore.access import (
    ADMIN_ROLE,
    EVERYTHING,
    NOTHING,
    PUBLIC,
    RIGHTS_RECORDS,
    NameSet,
    Rights,
    RightsBook,
    RoleRights,
    rights_of,
)
from tierkv.kvcore.errors import RightMissingError
from tierkv.metaserver.client import ClusterRecord
from tierkv.sql.cluster_command import GrantedRight, RightKind

NAMES = st.sampled_from(["a", "b", "c", "d"])
sets = st.builds(NameSet, st.booleans(), st.frozensets(NAMES))


@given(sets, st.lists(NAMES), NAMES)
def test_names_come_and_go(names: NameSet, changed: list[str], asked: str) -> None:
    assert (asked in names.with_names(changed)) == (asked in names or asked in changed)
    assert (asked in names.without_names(changed)) == (asked in names and asked not in changed)


@given(
    st.dictionaries(
        NAMES, st.builds(RoleRights, sets, sets, st.frozensets(NAMES), owns=st.frozensets(NAMES))
    )
)
def test_rights_survive_their_records(roles: dict[str, RoleRights]) -> None:
    records = [ClusterRecord(RIGHTS_RECORDS, role, own.to_json()) for role, own in roles.items()]
    assert rights_of(records) == Rights(roles)


@given(st.dictionaries(NAMES, st.frozensets(NAMES)), NAMES)
def test_roles_of_roles_end_also_in_circles(above: dict[str, frozenset[str]], user: str) -> None:
    rights = Rights({role: RoleRights(member_of=roles) for role, roles in above.items()})
    found = rights.roles_of(user)
    assert {user, PUBLIC} <= found
    assert all(above.get(role, frozenset()) <= found for role in found)


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"functions": 1, "models": 2, "member_of": 3}'])
def test_an_unreadable_record_gives_no_right(body: str) -> None:
    book = RightsBook()
    book.rights = rights_of([ClusterRecord(RIGHTS_RECORDS, PUBLIC, body)])
    with pytest.raises(RightMissingError):
        book.check_functions("ann", ["ai_generate"])
    with pytest.raises(RightMissingError):
        book.check_model("ann", "tiny")


def test_everybody_may_until_it_is_revoked_and_administrators_always() -> None:
    book = RightsBook()
    book.check_functions("ann", ["ai_generate"])
    revoked = GrantedRight(RightKind.FUNCTION, (), (PUBLIC,))
    public = changed_rights(book.rights.own(PUBLIC), revoked, grants=False)
    assert public == RoleRights(NOTHING, EVERYTHING)
    member = RoleRights(member_of=frozenset({ADMIN_ROLE}))
    book.rights = Rights({PUBLIC: public, "ann": member})
    book.admins = frozenset({"root"})
    book.outside = {"dba": frozenset({ADMIN_ROLE})}
    for user in ("ann", "root", "dba"):
        assert book.is_admin(user)
        book.check_functions(user, ["ai_generate"])
    with pytest.raises(RightMissingError, match="permission denied for function ai_filter"):
        book.check_functions("bob", ["ai_filter"])
    assert book.denied == {("bob", "function ai_filter"): 1}


def test_a_name_in_other_letters_owns_no_schema_of_a_known_user() -> None:
    """The tenant of a REST key is any name, and names of schemas have no case."""
    book = RightsBook()
    assert book.owns_schema("Ann", "ann") and book.owns_schema("Bob", "bob")
    book.users = frozenset({"ann"})
    book.rights = Rights({"bob": RoleRights(), "Ann": RoleRights(owns=frozenset({"eve"}))})
    for known, other in (("ann", "Ann"), ("bob", "Bob")):
        assert book.owns_schema(known, known)
        assert book.foreign_schemas(other, {known, "other"}) == {known, "other"}
    assert book.owns_schema("Ann", "eve") is False
    book.users = frozenset({"Ann"})
    assert book.owns_schema("Ann", "ann") and not book.owns_schema("ann", "ann")


def test_a_namespace_named_as_another_user_shows_its_blocks_and_not_the_users_statements() -> None:
    mine = ("bob", "ann")
    statements = [{"userid": "ann"}, {"userid": "bob"}]
    assert visible_rows("stat_statements", statements, mine) == [{"userid": "bob"}]
    blocks = [{"cache_scope": scope} for scope in ("ann", "bob", "eve")]
    assert visible_rows("kvcache_blocks", blocks, mine) == blocks[:2]
    assert visible_rows("kvcache_blocks", blocks, None) == blocks


@given(st.dictionaries(NAMES, st.frozensets(NAMES)), NAMES, NAMES)
def test_each_schema_has_one_owner_after_all_moves(
    steps: dict[str, frozenset[str]], first: str, second: str
) -> None:
    """As long as schemas only move by REASSIGN OWNED."""
    rights = Rights({name: RoleRights() for name in "abcd"})
    for old, new in [*((old, new) for old, to in steps.items() for new in to), (first, second)]:
        there = rights.owned_schemas(old)
        changed = with_owner_changed(rights, [old], new, there)
        rights = Rights({**rights.roles, **changed})
        assert old == new or not rights.owned_schemas(old)
        assert there <= rights.owned_schemas(new)
        owned = [schema for name in "abcd" for schema in rights.owned_schemas(name)]
        assert sorted(owned) == list("abcd")


def test_rights_on_tables_follow_and_end() -> None:
    select, insert = frozenset({"SELECT"}), frozenset({"INSERT"})
    rights = Rights(
        {
            "bob": RoleRights(tables={"a.x": select, "a.y": insert, "b.x": select}),
            "eve": RoleRights(tables={"b.x": insert}, owns=frozenset({"a"})),
        }
    )
    moved = with_tables_moved(rights, {"a.x": "a.y", "a.y": "a.x", "b.x": None, "a.*": None})
    assert moved == {
        "bob": RoleRights(tables={"a.y": select, "a.x": insert}),
        "eve": RoleRights(),
    }
    dropped = with_owner_changed(rights, ["bob"], None, frozenset({"b"}))
    assert dropped == {
        "bob": RoleRights(),
        "eve": RoleRights(owns=frozenset({"a"})),
    }
