"""polyflash inside other libraries. Nothing is imported or patched until one of these modules is named."""
