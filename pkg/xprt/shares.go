package xprt

// While several users make calls, each may have minShareCalls in flight. A user may have more if
// they have at most shareBytes of payload together, up to the credits divided by creditShare. A call
// of another user waits at the server and on the link behind the calls in flight, so these bounds
// limit what a user with many calls can add to its time. One user alone has all credits.
const (
	minShareCalls = 2
	shareBytes    = 1 << 20
	creditShare   = 4
	// presentCalls is the number of calls of all users after which a user without a call no longer
	// counts.
	presentCalls = 1024
)

// shares counts the calls in flight of each user, for a window. The keepalive calls do not count.
type shares struct {
	users map[uint32]share // those with calls in flight
	calls uint64           // all that asked for a credit
	// The latest two users, the latest one first.
	latest [2]struct {
		user uint32
		call uint64 // value of calls at the latest call of the user; 0 for none
	}
}

// A share is what a user has in flight.
type share struct{ calls, bytes int }

// ask notes that a user asks for a credit.
func (s *shares) ask(user uint32) {
	s.calls++
	l := &s.latest
	if l[0].user != user || l[0].call == 0 {
		l[1] = l[0]
	}
	l[0].user, l[0].call = user, s.calls
}

// allows reports whether a user may have another call in flight, with a payload of some bytes.
func (s *shares) allows(user uint32, bytes, credits int) bool {
	other := s.latest[0]
	if other.user == user {
		other = s.latest[1]
	}
	if other.call == 0 || s.calls-other.call >= presentCalls {
		return true
	}
	u := s.users[user]
	return u.calls < minShareCalls || u.calls < credits/creditShare && u.bytes+bytes <= shareBytes
}

// add counts a call in flight, or with a negative number of calls the end of one.
func (s *shares) add(user uint32, calls, bytes int) {
	u := s.users[user]
	u.calls, u.bytes = u.calls+calls, u.bytes+calls*bytes
	if u.calls == 0 {
		delete(s.users, user)
		return
	}
	if s.users == nil {
		s.users = make(map[uint32]share)
	}
	s.users[user] = u
}

// reset forgets the calls in flight.
func (s *shares) reset() { clear(s.users) }
