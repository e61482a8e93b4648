"""A change of rights, roles and logins by GRANT, REVOKE, and CREATE, ALTER or DROP of a role.

Pure. Used by tierkv/parts/front_source.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from tierkv.kvcore.access import (
    ADMIN_ROLE,
    EVERYTHING,
    NOTHING,
    PUBLIC,
    NameSet,
    Rights,
    RoleRights,
)
from tierkv.kvcore.errors import SqlError
from tierkv.sql.calls.functions import AI_FUNCTIONS
from tierkv.sql.cluster_command import ClusterCommand, GrantedRight, RightKind
from tierkv.sql.jobs.job_tables import SCHEMA as JOBS_SCHEMA
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
            if right_of := AI_FUNCTIONS[name].right:
                raise SqlError(
                    f"{name} has no right of its own",
                    sqlstate="0LP01",
                    position=right.position,
                    hint=f"The right to call {right_of} is the right to call {name}.",
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
    members, tables = old.member_of, dict(old.tables)
    if right.kind is RightKind.TABLE:
        for name in right.names:
            before = tables.pop(name, frozenset())
            after = before | right.privileges if grants else before - right.privileges
            if after:
                tables[name] = after
        return replace(old, tables=tables)
    if right.kind is RightKind.ROLE:
        members = members.union(right.names) if grants else members.difference(right.names)
    elif not right.names:
        values[right.kind] = EVERYTHING if grants else NOTHING
    else:
        held = values[right.kind]
        change = held.with_names if grants else held.without_names
        values[right.kind] = change(right.names)
    functions, models = values[RightKind.FUNCTION], values[RightKind.MODEL]
    return RoleRights(functions, models, members, tables, old.owns)


def with_tables_moved(known: Rights, moved: Mapping[str, str | None]) -> dict[str, RoleRights]:
    """Return the roles that change when tables get other names or are dropped.

    Args:
        known: all rights.
        moved: the new name by name, ``schema.table``; None: dropped. ``schema.*`` names a schema.
    """
    gone = {name.removesuffix(".*") for name, new in moved.items() if new is None and "*" in name}
    changed: dict[str, RoleRights] = {}
    for role, rights in known.roles.items():
        tables: dict[str, frozenset[str]] = {}
        for name, held in rights.tables.items():
            new = moved.get(name, name)
            if new is not None:
                tables[new] = tables.get(new, frozenset()) | held
        after = replace(rights, tables=tables, owns=rights.owns - gone)
        if after != rights:
            changed[role] = after
    return changed


def with_owner_changed(
    known: Rights, roles: Iterable[str], owner: str | None, schemas: AbstractSet[str]
) -> dict[str, RoleRights]:
    """Return the roles that change by DROP OWNED or REASSIGN OWNED.

    As in PostgreSQL, DROP OWNED also takes the rights granted to the roles; memberships stay.

    Args:
        known: all rights.
        roles: the former owners.
        owner: gets the schemas; None: the schemas were dropped.
        schemas: of the former owners, as far as they exist, in lower case.
    """
    after = dict(known.roles)
    if owner is None:
        moved = dict.fromkeys(
            name
            for rights in known.roles.values()
            for name in rights.tables
            if name.partition(".")[0] in schemas
        )
        after |= with_tables_moved(known, moved)
        for role in roles:
            members = after.get(role, RoleRights()).member_of
            after[role] = RoleRights(member_of=members)
    else:
        for role in roles:
            old = after.get(role, RoleRights())
            after[role] = replace(old, owns=old.owns - schemas)
        new = after.get(owner, RoleRights())
        after[owner] = replace(new, owns=new.owns | (schemas - {owner.lower()}))
    return {role: rights for role, rights in after.items() if rights != known.own(role)}


def with_role(known: Rights, name: str, *, exists: bool) -> dict[str, RoleRights | None]:
    """Return the roles that change when a role is made or dropped; None drops a role.

    Nobody is a member of a dropped role any more.
    """
    if exists:
        return {name: RoleRights()}
    members = {
        role: replace(rights, member_of=rights.member_of - {name})
        for role, rights in known.roles.items()
        if name in rights.member_of
    }
    return {**members, name: None}


def check_login(command: ClusterCommand, known: Rights, configured: Iterable[str]) -> None:
    """Refuse a password for a user without need of a password.

    Args:
        command: CREATE or ALTER of a user.
        known: the roles there are.
        configured: users with passwords in the configuration.

    Raises:
        SqlError: nobody needs a password here, the user is the configuration's, or the role of an
            ALTER does not exist.
    """
    if not configured:
        raise SqlError(
            "this front asks nobody for a password",
            sqlstate="55000",
            hint="Set front.users and front.admins first; then CREATE USER adds users.",
        )
    position = command.right.position if command.right is not None else 0
    if command.name in (PUBLIC, ADMIN_ROLE):
        raise SqlError(
            f'role name "{command.name}" is reserved', sqlstate="42939", position=position
        )
    if command.name in configured:
        raise SqlError(
            f'the password of user "{command.name}" is in front.users',
            sqlstate="42710" if command.verb == "CREATE" else "55000",
            position=position,
            hint="An operator changes it there.",
        )
    if command.verb == "ALTER" and command.name not in known.roles:
        raise wrong_role(command, known.roles)


def check_new_role(name: str, known: Iterable[str]) -> None:
    """Refuse a role with the name of another role in other letters: both would own one schema.

    Raises:
        SqlError: 42710; 42939 for the name of the schema of jobs.
    """
    if name.lower() == JOBS_SCHEMA:
        raise SqlError(f'role name "{name}" is reserved', sqlstate="42939")
    same = [role for role in known if role != name and role.lower() == name.lower()]
    if same:
        raise SqlError(
            f'role "{same[0]}" has the same name in other letters',
            sqlstate="42710",
            hint="Schemas of both would be the same. Use another name.",
        )


def check_owners(command: ClusterCommand, known: AbstractSet[str]) -> None:
    """Refuse DROP OWNED and REASSIGN OWNED of a role that does not exist.

    Raises:
        SqlError: 42704.
    """
    assert command.right is not None, "the statement names roles"
    for name in (*command.right.roles, *command.right.names):
        if name not in known:
            raise wrong_role(replace(command, name=name), known)


def wrong_role(command: ClusterCommand, known: Iterable[str]) -> SqlError:
    """Return the error of CREATE ROLE or DROP ROLE if the role exists or not."""
    if command.verb == "CREATE":
        return SqlError(f'role "{command.name}" already exists', sqlstate="42710")
    return SqlError(
        f'role "{command.name}" does not exist',
        sqlstate="42704",
        hint=did_you_mean(command.name, known),
    )
