"""The queue, the scheduler, request handles, and the engines that a service embeds."""
