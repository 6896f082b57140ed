"""Queue, scheduler, handles, and the engines that a service embeds."""
