"""TLS of the HTTP endpoint: one context whose certificate is read again on demand.

Connections that exist keep what they have; new ones get the new certificate. Files that cannot be used leave everything
as it was.
"""

from __future__ import annotations

import logging
import ssl

from baton.wire.errors import InvalidSetting

_log = logging.getLogger(__name__)


class ServerTls:
    """The certificate and key in two PEM files. The key may be in the certificate's file; `key_file` is then ""."""

    def __init__(self, certificate_file: str, key_file: str) -> None:
        """Loads the files. Raises `InvalidSetting` for files that cannot be used."""
        self._files = (certificate_file, key_file or None)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(self.context)

    def reload(self) -> None:
        """Use the files as they are now for new connections. Ones that cannot be used are logged."""
        try:
            # the first one to see it is not the one in use: a certificate without its key would be half a change
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except InvalidSetting as error:
            _log.error("the certificate stays as it was: %s", error)

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            # without a password OpenSSL would ask for one on the terminal
            context.load_cert_chain(*self._files, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise InvalidSetting(f"--ssl-certfile, --ssl-keyfile: {error}") from None
