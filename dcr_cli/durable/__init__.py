"""Every change to local disk: create, write, sync, rename, link, remove. No other package changes it.

Before each change the functions in `hooks` are called; a test that stops or records there sees every step there is,
and what the system could refuse is refused there in the same words.
What is changed, and in which order, is the callers' business. Paths inside a folder are opened without following
links, so nothing is ever written outside it.
"""

from dcr_cli.durable.file import PRIVATE_FILE_MODE, File, may_give_owner
from dcr_cli.durable.folder import NEW_FILE_MODE, NEW_FOLDER_MODE, PRIVATE_FOLDER_MODE, Folder, open_folder
from dcr_cli.durable.steps import NoRoomError, check_mounted_to_write, hooks, translating

__all__ = [
    "NEW_FILE_MODE",
    "NEW_FOLDER_MODE",
    "PRIVATE_FILE_MODE",
    "PRIVATE_FOLDER_MODE",
    "File",
    "Folder",
    "NoRoomError",
    "check_mounted_to_write",
    "hooks",
    "may_give_owner",
    "open_folder",
    "translating",
]
