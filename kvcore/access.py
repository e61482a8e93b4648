"""Who may enter by REST, and what users may do: REST keys, and rights on functions and models.

Pure values, and a front's book of the rights of now. The meta server keeps both as
records, and every front obeys within a second (tierkv/parts/record_follower.py).

Keys are made by ``tierkv key create`` and stored as hashes; dbfront/http/config.py lets owners of
keys in. A key has 256 random bits, so a plain SHA-256 can't be tried backwards.

GRANT and REVOKE change rights (dbfront/statement/rights_change.py). As in PostgreSQL, everybody may
call functions until EXECUTE is revoked from PUBLIC. A role has its own rights, PUBLIC's, and those
of the roles above: GRANT a TO b puts a above b. Roles need no creation: a role is a name with
rights or members. A front behind PostgreSQL also knows the roles of PostgreSQL.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import RightMissingError

KEY_RECORDS: Final = "key"
"""Kind of the records that hold keys (metaserver/client.py::ClusterRecord)."""

RIGHTS_RECORDS: Final = "rights"
"""Kind of the records that hold rights."""

LOGIN_RECORDS: Final = "login"
"""Kind of the records that hold logins of SQL users, made by CREATE USER."""

PUBLIC: Final = "public"
"""The role that everybody is a member of."""

ADMIN_ROLE: Final = "tierkv_admin"
"""Members may change namespaces, limits and rights, and see the rows of all users."""

PREFIX: Final = "tk-"
"""Begins every key, so that scanners of source code find keys that were committed."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret.

    Attributes:
        name: unique; the name in limits and in the audit log.
        tenant: whoever uses the key acts as this tenant, which is a SQL user.
        digest: SHA-256 of the key, as 64 hexadecimal digits.
        made_unix_s: when it was made.
    """

    name: str
    tenant: str
    digest: str
    made_unix_s: float = 0.0

    def to_json(self) -> str:
        """Return the body of the key's record."""
        return json.dumps(
            {"tenant": self.tenant, "digest": self.digest, "made_unix_s": self.made_unix_s}
        )


def new_key() -> str:
    """Return a new random key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """Return the digest under which a key is stored."""
    return hashlib.sha256(key.encode()).hexdigest()


def keys_of(records: Iterable[Any]) -> dict[str, ApiKey]:
    """Return the keys among records by digest; an unreadable record opens no door.

    Args:
        records: have ``kind``, ``name`` and ``body``.
    """
    found: dict[str, ApiKey] = {}
    for record in records:
        if record.kind != KEY_RECORDS:
            continue
        try:
            told = json.loads(record.body)
            made_s = float(told.get("made_unix_s", 0.0))
            key = ApiKey(record.name, str(told["tenant"]), str(told["digest"]), made_s)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        found[key.digest] = key
    return found


def login_body(verifier: str) -> str:
    """Return the body of a login's record; empty, to remove the record, without a verifier."""
    return json.dumps({"verifier": verifier}) if verifier else ""


def logins_of(records: Iterable[Any]) -> dict[str, str]:
    """Return the SCRAM verifiers among records by user; an unreadable record lets nobody in.

    Args:
        records: have ``kind``, ``name`` and ``body``.
    """
    found: dict[str, str] = {}
    for record in records:
        if record.kind == LOGIN_RECORDS:
            try:
                found[record.name] = str(json.loads(record.body)["verifier"])
            except (ValueError, TypeError, KeyError):
                continue
    return found


@dataclass(frozen=True, slots=True)
class NameSet:
    """A set of names, or all names but some.

    Attributes:
        all_but: True: every name is in the set, except ``names``.
        names: the names in the set, or the exceptions.
    """

    all_but: bool = False
    names: frozenset[str] = frozenset()

    def __contains__(self, name: object) -> bool:
        return (name in self.names) != self.all_but

    def with_names(self, names: Iterable[str]) -> NameSet:
        """Return the set with more names."""
        changed = self.names.difference(names) if self.all_but else self.names.union(names)
        return NameSet(self.all_but, changed)

    def without_names(self, names: Iterable[str]) -> NameSet:
        """Return the set without some names."""
        changed = self.names.union(names) if self.all_but else self.names.difference(names)
        return NameSet(self.all_but, changed)

    def __str__(self) -> str:
        listed = ", ".join(sorted(self.names))
        return f"all{f' but {listed}' if listed else ''}" if self.all_but else listed


NOTHING: Final = NameSet()
EVERYTHING: Final = NameSet(all_but=True)


@dataclass(frozen=True, slots=True)
class RoleRights:
    """The own rights of one role.

    Attributes:
        functions: allowed AI functions, by SQL name.
        models: allowed models.
        member_of: roles whose rights the role has too.
        tables: privileges by ``schema.table``, or by ``schema.*`` for all tables of a schema.
        owns: schemas of other roles, given to this role by REASSIGN OWNED, in lower case.
    """

    functions: NameSet = NOTHING
    models: NameSet = NOTHING
    member_of: frozenset[str] = frozenset()
    tables: Mapping[str, frozenset[str]] = field(default_factory=dict)
    owns: frozenset[str] = frozenset()

    def to_json(self) -> str:
        """Return the body of a record."""
        told = asdict(self)
        for one in (told["functions"], told["models"]):
            one["names"] = sorted(one["names"])
        tables = {name: sorted(privileges) for name, privileges in self.tables.items()}
        lists = {"member_of": sorted(self.member_of), "owns": sorted(self.owns)}
        return json.dumps(told | lists | {"tables": tables})

    @classmethod
    def from_json(cls, text: str) -> RoleRights:
        """Read the body of a record; what a later release added is left alone.

        Raises:
            ValueError: the text is not that of rights.
        """
        try:
            told = json.loads(text)
            functions, models = (
                NameSet(bool(told[name]["all_but"]), frozenset(map(str, told[name]["names"])))
                for name in ("functions", "models")
            )
            tables = {
                str(name): frozenset(map(str, privileges))
                for name, privileges in told.get("tables", {}).items()
            }
            owns = frozenset(map(str, told.get("owns", ())))
            return cls(functions, models, frozenset(map(str, told["member_of"])), tables, owns)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from error


USUAL: Final = RoleRights(EVERYTHING, EVERYTHING)
"""PUBLIC's rights until they are changed."""


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of all roles.

    Attributes:
        roles: by name; an unlisted role has no own rights.
        reassigned: schemas that belong to another role than the role of their name.
    """

    roles: Mapping[str, RoleRights] = field(default_factory=dict)
    reassigned: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        given = frozenset[str]().union(*(rights.owns for rights in self.roles.values()))
        object.__setattr__(self, "reassigned", given)

    def own(self, role: str) -> RoleRights:
        """Return the own rights of a role."""
        return self.roles.get(role, USUAL if role == PUBLIC else RoleRights())

    def owned_schemas(self, role: str) -> frozenset[str]:
        """Return the schemas that belong to a role, whether they exist or not, in lower case."""
        return (frozenset({role.lower()}) - self.reassigned) | self.own(role).owns

    def changed(self, role: str, **values: Any) -> RoleRights:
        """Return a role's own rights with some values changed."""
        return replace(self.own(role), **values)

    @property
    def restrict(self) -> bool:
        """Return whether PUBLIC lacks a right."""
        usual = self.own(PUBLIC)
        return usual.functions != EVERYTHING or usual.models != EVERYTHING

    def roles_of(self, user: str, others: Iterable[str] = ()) -> frozenset[str]:
        """Return all roles whose rights a user has, among them PUBLIC and the user's own.

        Args:
            user: the user.
            others: more roles that the user is a member of.
        """
        found: set[str] = set()
        ahead = [user, PUBLIC, *others]
        while ahead:
            role = ahead.pop()
            if role not in found:
                found.add(role)
                ahead += self.own(role).member_of
        return frozenset(found)


def rights_of(records: Iterable[Any]) -> Rights:
    """Return the rights among records.

    An unreadable record of a later release gives no right: PUBLIC then has none.

    Args:
        records: have ``kind``, ``name`` and ``body``.
    """
    found: dict[str, RoleRights] = {}
    for record in records:
        if record.kind != RIGHTS_RECORDS:
            continue
        try:
            found[record.name] = RoleRights.from_json(record.body)
        except ValueError:
            found[record.name] = RoleRights()
    return Rights(found)


class RightsBook:
    """The rights that one front obeys. Used from one event loop.

    Attributes:
        rights: replaced as a whole when the records change.
        outside: roles that a user has in PostgreSQL.
        admins: users of the configuration who administer the cluster.
        users: users of the configuration who log in.
        denied: calls refused so far, by user and right, for the audit log.
    """

    def __init__(self) -> None:
        self.rights = Rights()
        self.outside: dict[str, frozenset[str]] = {}
        self.admins: frozenset[str] = frozenset()
        self.users: frozenset[str] = frozenset()
        self.denied: Counter[tuple[str, str]] = Counter()

    def roles_of(self, user: str) -> frozenset[str]:
        """Return all roles whose rights a user has."""
        roles = self.rights.roles_of(user, self.outside.get(user, ()))
        return roles | {ADMIN_ROLE} if user in self.admins else roles

    def is_admin(self, user: str) -> bool:
        """Return whether a user administers the cluster."""
        return ADMIN_ROLE in self.roles_of(user)

    def owns_schema(self, user: str, schema: str) -> bool:
        """Return whether a schema belongs to the user, or to a role of the user."""
        return not self.foreign_schemas(user, {schema})

    def foreign_schemas(self, user: str, schemas: AbstractSet[str]) -> AbstractSet[str]:
        """Return the schemas of other users and roles among some, all in lower case."""
        roles = self.roles_of(user)
        if ADMIN_ROLE in roles:
            return frozenset()
        if self._is_shadow(user):  # As the tenant of a REST key.
            roles -= {user}
        own = (self.rights.owned_schemas(role) for role in roles if role != PUBLIC)
        return schemas - frozenset[str]().union(*own)

    def _is_shadow(self, user: str) -> bool:
        """Return whether the schema of a user's name is that of a known user in other letters."""
        if user in self.users:
            return False
        named = user.lower()
        if any(other.lower() == named for other in self.users):
            return True
        known = self.rights.roles
        return user not in known and any(other.lower() == named for other in known)

    def table_privileges(self, user: str, schema: str, table: str) -> set[str]:
        """Return what a user was granted on another user's table."""
        held: set[str] = set()
        for role in self.roles_of(user):
            tables = self.rights.own(role).tables
            for name in (f"{schema}.{table}", f"{schema}.*"):
                held |= tables.get(name, frozenset())
        return held

    def check_functions(self, user: str, functions: Iterable[str]) -> None:
        """Refuse a user who may not call a function.

        Raises:
            RightMissingError: names the first such function.
        """
        if not self.rights.restrict:
            return
        roles = self.roles_of(user)
        allowed = [self.rights.own(role).functions for role in roles]
        for function in functions:
            if not _held(function, allowed, roles):
                self._deny(user, f"function {function}")
                raise RightMissingError(
                    f"permission denied for function {function}",
                    hint=f'An administrator runs GRANT EXECUTE ON FUNCTION {function} TO "{user}".',
                )

    def check_model(self, user: str, model: str) -> None:
        """Refuse a user who may not use a model.

        Raises:
            RightMissingError: names the model.
        """
        if not self.rights.restrict:
            return
        roles = self.roles_of(user)
        if not _held(model, [self.rights.own(role).models for role in roles], roles):
            self._deny(user, f"model {model}")
            raise RightMissingError(
                f"permission denied for model {model}",
                hint=f'An administrator runs GRANT USAGE ON MODEL "{model}" TO "{user}".',
            )

    def _deny(self, user: str, right: str) -> None:
        if len(self.denied) < limits.MAX_AUDIT_RECORDS or (user, right) in self.denied:
            self.denied[user, right] += 1


def _held(name: str, allowed: Iterable[NameSet], roles: frozenset[str]) -> bool:
    return ADMIN_ROLE in roles or any(name in names for names in allowed)
