"""Create or update, by name, the automations in automations.yaml.

    python -m flows.automations                                        what brings crashed runs back
    python -m flows.automations --notify custom-webhook/finetune       the same, and messages through that block
    python -m flows.automations --notify slack-webhook/finetune --on failed,crashed
    python -m flows.automations --notify none                          no messages any more

Without --notify the messages stay as they are. Which server: PREFECT_API_URL.
"""

import argparse
import sys
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from config.cli import USAGE_ERROR
from config.settings import PROJECT_ROOT


def main(arguments: list[str]) -> None:
    wanted = yaml.safe_load((PROJECT_ROOT / "automations.yaml").read_text())
    options = parse(arguments, list(wanted["notifications"]))
    if not get_current_settings().api.url:
        sys.exit("PREFECT_API_URL is not set: automations need a server that stays.")
    with get_client(sync_client=True) as client:
        block = find_block(client, options.notify) if options.notify not in (None, "none") else None
        for automation in wanted["automations"]:
            put(client, automation)
        for event, notification in wanted["notifications"].items():
            if block and event in options.on:
                put(client, message(notification, block))
            elif options.notify:
                remove(client, notification["name"])


def parse(arguments: list[str], events: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flows.automations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--notify", metavar="BLOCK_TYPE/BLOCK_NAME", help="block to send messages with, or `none`")
    parser.add_argument("--on", type=lambda text: text.split(","), help=f"of {','.join(events)}; default: all")
    options = parser.parse_args(arguments)
    if options.on and (options.notify in (None, "none") or set(options.on) - set(events)):
        parser.error(f"--on {','.join(options.on)}: needs --notify with a block, and must be of {','.join(events)}")
    options.on = options.on or events
    return options


def find_block(client: SyncPrefectClient, name: str) -> str:
    """Id of the block document BLOCK_TYPE/BLOCK_NAME. Exits when there is none."""
    block_type, _, block_name = name.partition("/")
    try:
        return str(client.read_block_document_by_name(block_name, block_type).id)
    except ObjectNotFound:
        print(
            f"--notify {name}: the server has no such block. `prefect block ls` lists those it has; "
            "docs/notifications.md says how to make one.",
            file=sys.stderr,
        )
        sys.exit(USAGE_ERROR)


def message(notification: dict[str, Any], block: str) -> dict[str, Any]:
    texts = {part: notification[part] for part in ("subject", "body")}
    action = {"type": "send-notification", "block_document_id": block, **texts}
    return {**{name: value for name, value in notification.items() if name not in texts}, "actions": [action]}


def put(client: SyncPrefectClient, wanted: dict[str, Any]) -> None:
    automation = AutomationCore.model_validate(wanted)
    existing = client.read_automations_by_name(automation.name)
    for extra in existing[1:]:
        client.delete_automation(extra.id)
    if existing:
        client.update_automation(existing[0].id, automation)
    else:
        client.create_automation(automation)
    print(f"{'updated' if existing else 'created'} {automation.name}")


def remove(client: SyncPrefectClient, name: str) -> None:
    for automation in client.read_automations_by_name(name):
        client.delete_automation(automation.id)
        print(f"removed {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
