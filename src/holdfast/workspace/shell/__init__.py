"""The ``bash`` tool: ``tool`` declares it, ``binder`` finds what an approval is bound to, ``process`` runs it."""
