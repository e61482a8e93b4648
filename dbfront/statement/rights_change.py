"""A change of the own rights of a role by GRANT or REVOKE.

Pure. Used by tierkv/parts/front_source.py.
"""

from __future__ import annotations

from tierkv.kvcore.access import EVERYTHING, NOTHING, PUBLIC, NameSet, RoleRights
from tierkv.kvcore.errors import SqlError
from tierkv.sql.calls.functions import AI_FUNCTIONS
from tierkv.sql.cluster_command import GrantedRight, RightKind
from tierkv.sql.text.suggest import did_you_mean


def check_right(right: GrantedRight) -> None:
    """Refuse a right that can't be.

    Raises:
        SqlError: an unknown AI function, or a membership of or in PUBLIC.
    """
    if right.kind is RightKind.FUNCTION:
        for name in right.names:
            if name not in AI_FUNCTIONS:
                raise SqlError(
                    f"AI function {name} does not exist",
                    sqlstate="42883",
                    position=right.position,
                    hint=did_you_mean(name, AI_FUNCTIONS),
                )
    if right.kind is RightKind.ROLE and PUBLIC in (*right.names, *right.roles):
        raise SqlError(
            "public has everybody as member, and is a member of no role",
            sqlstate="0LP01",
            position=right.position,
            hint="GRANT EXECUTE or USAGE TO PUBLIC gives everybody a right.",
        )


def changed_rights(old: RoleRights, right: GrantedRight, *, grants: bool) -> RoleRights:
    """Return a role's rights after a GRANT or a REVOKE."""
    values: dict[RightKind, NameSet] = {
        RightKind.FUNCTION: old.functions, RightKind.MODEL: old.models,
    }  # fmt: skip
    members = old.member_of
    if right.kind is RightKind.ROLE:
        members = members.union(right.names) if grants else members.difference(right.names)
    elif not right.names:
        values[right.kind] = EVERYTHING if grants else NOTHING
    else:
        held = values[right.kind]
        change = held.with_names if grants else held.without_names
        values[right.kind] = change(right.names)
    return RoleRights(values[RightKind.FUNCTION], values[RightKind.MODEL], members)
