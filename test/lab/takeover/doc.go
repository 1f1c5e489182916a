// Package takeover tests on an old kernel that a mount continues when its process is killed. Linux
// before 6.9 cannot send FUSE requests again, see kernel.DevFuse.KeepRequests.
package takeover
