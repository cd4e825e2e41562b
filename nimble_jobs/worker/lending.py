"""A training on several GPUs gets them from the other posts of its worker, which have their devices back at its end."""

from __future__ import annotations

from collections.abc import Sequence

from nimble_jobs.worker.post import Post

GIVEN_BACK = "its device was lent to another job, which asked for several devices before it did"


def lend(posts: Sequence[Post]) -> None:
    """Take devices back from jobs that have ended, and lend idle ones to jobs that ask, in the order in which they did.

    A job that gets too few keeps those, and the next device to become idle is its own. Jobs that asked later would wait
    for it, and it for them: they go back to the queue.
    """
    asking = {post.running.job.id: post for post in posts if post.running and post.running.borrows}
    for post in posts:
        if post.lent is not None and post.lent not in asking:
            post.take_back()
    order = sorted(asking, key=lambda job: asking[job].running.borrows_since)  # type: ignore[union-attr]
    for place, job in enumerate(order):
        lack = _lack(posts, asking[job])
        for post in [each for each in posts if each.can_lend][:lack]:
            post.lend(job)
        if (lack := _lack(posts, asking[job])) <= 0:
            continue
        later = [asking[each] for each in order[place + 1 :] if _lack(posts, asking[each]) > 0]
        for post in later[::-1][:lack]:
            post.give_back(GIVEN_BACK)
            post.lend(job)
        return  # whatever becomes idle is for this job


def _lack(posts: Sequence[Post], asker: Post) -> int:
    """How many devices a job still waits for."""
    running = asker.running
    if running is None:
        return 0
    return running.borrows - sum(post.lent == running.job.id for post in posts)
