"""Create or update, by name, the automations in automations.yaml: `python -m flows.automations`.

They are what brings a crashed run back, see there. Which server: PREFECT_API_URL.
"""

import sys

import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import get_current_settings

from config.settings import PROJECT_ROOT


def main() -> None:
    if not get_current_settings().api.url:
        sys.exit("PREFECT_API_URL is not set: automations need a server that stays.")
    wanted = yaml.safe_load((PROJECT_ROOT / "automations.yaml").read_text())["automations"]
    with get_client(sync_client=True) as client:
        for automation in map(AutomationCore.model_validate, wanted):
            existing = client.read_automations_by_name(automation.name)
            for extra in existing[1:]:
                client.delete_automation(extra.id)
            if existing:
                client.update_automation(existing[0].id, automation)
            else:
                client.create_automation(automation)
            print(f"{'updated' if existing else 'created'} {automation.name}")


if __name__ == "__main__":
    main()
