"""What an address and storage options say about an object store: bucket, prefix, settings, credentials.

Settings have obstore's names; the names that fsspec's own backends use for the most common ones are understood too.
Credentials that are not given come from the environment variables, files and services that a cloud's own tools use.
Nothing here talks to a store.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dcr_cli.errors import UsageError
from dcr_cli.store.location import Location

_S3_NAMES = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "anon": "skip_signature",
}
_GCS_NAMES = {"token": "application_credentials", "endpoint_url": "base_url"}
_AZURE_NAMES = {"sas_token": "sas_key", "endpoint_url": "endpoint", "anon": "skip_signature"}
_CONNECTION_NAMES = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}
_ENVIRONMENT_KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_OPTIONS_HINT = "credentials come from the cloud's own tools, or by --storage-option"
# What a profile says when its keys have to be asked for.
_ASKING = ("sso_session", "sso_start_url", "role_arn", "credential_process", "credential_source")


@dataclass(frozen=True, slots=True)
class Cloud:
    """An object store: `kind` is obstore's name of it. `profile` is one whose credentials boto3 has to ask for."""

    kind: str
    bucket: str
    prefix: str
    settings: Mapping[str, object] = field(repr=False)
    client_options: Mapping[str, object] = field(repr=False)
    profile: str | None = None


def cloud_of(location: Location, options: Mapping[str, object], environment: Mapping[str, str] = os.environ) -> Cloud:
    """Put together what an address, options and environment say; UsageError where they contradict themselves."""
    if location.protocol in ("s3", "s3a"):
        return _s3(location, dict(options), environment)
    if location.protocol in ("gs", "gcs"):
        if location.user is not None:
            raise UsageError(location.shown, "has a user in front of its bucket", hint=_OPTIONS_HINT)
        settings = _renamed(options, _GCS_NAMES)
        match settings.get("application_credentials"):
            case "anon":
                del settings["application_credentials"]
                settings["skip_signature"] = True
            case "google_default" | "cloud":
                # Where they are looked for anyway.
                del settings["application_credentials"]
        return _cloud("GCS", location, location.host, location.path, settings, "base_url")
    return _azure(location, dict(options), environment)


def _s3(location: Location, options: dict[str, object], environment: Mapping[str, str]) -> Cloud:
    settings = _renamed({**options, **_inner(location, options, "client_kwargs")}, _S3_NAMES)
    if (not location.user) != (not location.password):
        raise UsageError(location.shown, "has half of a key in front of its bucket", hint=_OPTIONS_HINT)
    if location.user:
        settings |= {"access_key_id": location.user, "secret_access_key": location.password}
    named = settings.pop("profile", None)
    profile, is_asking = str(named or environment.get("AWS_PROFILE") or "default"), False
    has_keys = "access_key_id" in settings or settings.get("skip_signature")
    told = _profile(profile, environment)
    if named and not told:
        raise UsageError(location.shown, f"the profile {profile} is not in the AWS configuration files")
    if not has_keys and (named or not any(environment.get(key) for key in _ENVIRONMENT_KEYS)):
        keys = {
            ours: told[theirs]
            for theirs, ours in (
                ("aws_access_key_id", "access_key_id"),
                ("aws_secret_access_key", "secret_access_key"),
                ("aws_session_token", "session_token"),
            )
            if theirs in told
        }
        settings |= keys
        is_asking = not keys and any(key in told for key in _ASKING)
    if "region" not in settings and not (environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")):
        settings |= {"region": told["region"]} if "region" in told else {}
    if "endpoint" not in settings:
        endpoint = next((environment[name] for name in _ENDPOINTS if environment.get(name)), told.get("endpoint_url"))
        settings |= {"endpoint": endpoint} if endpoint else {}
    # One object is deleted at a time, which servers know that do not know the deletion of many.
    settings.setdefault("disable_bulk_delete", True)
    cloud = _cloud("S3", location, location.host, location.path, settings, "endpoint")
    return replace(cloud, profile=profile) if is_asking else cloud


def _azure(location: Location, options: dict[str, object], environment: Mapping[str, str]) -> Cloud:
    if location.password is not None:
        raise UsageError(location.shown, "has a password in front of its account", hint=_OPTIONS_HINT)
    text = options.pop("connection_string", "")
    if not options and location.user is None:
        text = text or environment.get("AZURE_STORAGE_CONNECTION_STRING", "")
    settings = _renamed(options, _AZURE_NAMES)
    told = {name.strip().lower(): value for name, _, value in (part.partition("=") for part in str(text).split(";"))}
    settings |= {ours: told[theirs] for theirs, ours in _CONNECTION_NAMES.items() if theirs in told}
    if "endpointsuffix" in told and "endpoint" not in settings:
        # Another cloud than the usual one.
        scheme = told.get("defaultendpointsprotocol", "https")
        settings["endpoint"] = f"{scheme}://{settings.get('account_name', '')}.blob.{told['endpointsuffix']}"
    container, path = location.host, location.path
    if location.user is not None:
        # abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH
        container = location.user
        settings.setdefault("account_name", location.host.partition(".")[0])
    return _cloud("Azure", location, container, path, settings, "endpoint")


def _cloud(
    kind: str, location: Location, bucket: str, path: str, settings: dict[str, object], endpoint_name: str
) -> Cloud:
    if not bucket:
        raise UsageError(location.shown, "names no bucket")
    client_options = dict(_inner(location, settings, "client_options"))
    endpoint = str(settings.get(endpoint_name, ""))
    if location.port is not None:
        raise UsageError(location.shown, "a bucket has no port; give the server's address as endpoint_url")
    client_options.setdefault("allow_http", endpoint.startswith("http://"))
    return Cloud(kind, bucket, path.strip("/"), settings, client_options)


def _inner(location: Location, options: dict[str, object], name: str) -> Mapping[str, object]:
    """Take an option out that is made of options."""
    inner = options.pop(name, {})
    if not isinstance(inner, Mapping):
        raise UsageError(location.shown, f"the storage option {name} is not made of options")
    return inner


def _renamed(options: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    return {names.get(name, name): value for name, value in options.items() if value is not None}


def _profile(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What the AWS configuration files say about a profile; what cannot be read says nothing."""
    found: dict[str, str] = {}
    home = environment.get("HOME", "")
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(environment.get(variable) or os.path.join(home, ".aws", file), encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        if parser.has_section(section):
            found |= dict(parser.items(section))
    return found
