"""The chain whose stages run at once: one driver, and drafts in other processes of this machine or on other machines."""
