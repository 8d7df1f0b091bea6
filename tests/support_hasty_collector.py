"""The collector with leases of a second, for tests that outlast them: run by path, with a collector's environment."""

from __future__ import annotations

import sys

from tether_collector import __main__ as service
from tether_collector import registration

if __name__ == "__main__":
    vars(registration).update(REGISTRATION_TTL_S=1, REGISTRATION_RENEW_S=0.5)
    sys.exit(service.main())
