"""Programs of the project's makers; none of them is part of the installed packages."""
