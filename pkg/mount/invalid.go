package mount

import "time"

// invalidReplyPause is the shortest pause between log messages about invalid replies of one mount.
// The server controls their number. A metric counts each.
const invalidReplyPause = 10 * time.Second

// epoch is the start of the times of log messages.
var epoch = time.Now()

// invalidReply logs a reply that breaks NFSv3.
func (s *mountStack) invalidReply(reason string) {
	now := int64(max(time.Since(epoch), 1))
	last := s.invalid.Load()
	if last != 0 && now-last < int64(invalidReplyPause) || !s.invalid.CompareAndSwap(last, now) {
		return
	}
	s.shared.log.Warn("invalid reply from server; the request fails", "spec", s.spec.String(), "dir", s.dir,
		"reason", reason)
}
