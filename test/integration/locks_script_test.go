package integration

import (
	"strings"
	"testing"
)

// Each line of a lock script has a command of the process p or q and its result:
//
//	PROCESS COMMAND = RESULT
//	PROCESS COMMAND always RESULT      # execute the command 50 times
//	PROCESS COMMAND eventually RESULT  # execute the command until it has the result
//	PROCESS kill
//
// A and B are the paths of the file on both mounts.
const (
	rangesScript = `
		p set 1 w 0 0 = ok
		q set 1 w 0 0 = EAGAIN
		q set 1 r 5 1 = EAGAIN
		p set 1 r 0 0 = ok          # downgrade
		q set 1 r 0 0 = ok
		p set 1 w 0 0 = EAGAIN
		q set 1 u 0 0 = ok
		p set 1 u 0 0 = ok
		p set 1 w 100 100 = ok
		q set 1 w 0 100 = ok
		q get 1 r 0 0 = type 1 start 100 len 100
		q set 1 r 199 1 = EAGAIN
		p set 1 u 150 10 = ok
		q set 1 w 150 10 = ok
		q set 1 w 149 1 = EAGAIN
		q set 1 w 160 1 = EAGAIN
		p set 1 w 0 0 = EAGAIN
		q set 1 u 0 0 = ok
		p kill
		q set 1 w 0 0 eventually ok`
	sameMountScript = `
		p set 1 w 0 10 = ok
		q set 1 w 5 10 = EAGAIN
		p open 2 A = ok
		p set 2 w 5 10 = ok         # one process is one owner
		p close 2 = ok              # which releases all its locks
		q set 1 w 0 0 = ok
		q set 1 u 0 0 = ok
		p open 2 A = ok
		p set 1 w 0 10 = ok
		p close 1 = ok
		p set 2 w 0 10 = ok
		q set 1 w 5 10 always EAGAIN # the kernel sends RELEASE of the first file after close(2)
		p close 2 = ok
		p open 1 A = ok
		p ofd 1 w 0 10 = ok
		q set 1 w 5 10 = EAGAIN
		p close 1 = ok
		q set 1 w 5 10 eventually ok # close(2) does not wait for the release of OFD locks`
	flockScript = `
		p flock 1 sh = ok
		q flock 1 sh = ok
		q flock 1 ex = EAGAIN
		p flock 1 un = ok
		q flock 1 ex = ok
		p flock 1 sh = EAGAIN
		p set 1 w 100 1 = EAGAIN    # Linux's client, too, makes byte-range locks of both kinds
		q open 3 B = ok
		q flock 3 ex = EAGAIN       # another open file is another owner
		q close 3 = ok              # which releases nothing
		p flock 1 ex = EAGAIN
		q close 1 = ok
		p flock 1 ex eventually ok  # close(2) does not wait for the release of flock(2) locks`
	coherenceScript = `
		p set 1 w 0 0 = ok
		p write 1 first = ok
		p set 1 u 0 0 = ok
		q set 1 w 0 0 = ok
		q read 1 = "first"          # and caches it
		q set 1 u 0 0 = ok
		p set 1 w 0 0 = ok
		p write 1 other = ok
		p set 1 u 0 0 = ok
		q set 1 r 0 0 = ok
		q read 1 = "other"`
)

// lockScript returns a test that executes a lock script.
func lockScript(script string) func(t *testing.T, a, b *lockMount, p, q *lockProcess) {
	return func(t *testing.T, a, b *lockMount, p, q *lockProcess) {
		paths := strings.NewReplacer("A", a.file(), "B", b.file())
		for line := range strings.Lines(strings.TrimSpace(script)) {
			step, _, _ := strings.Cut(line, "#")
			who, step, _ := strings.Cut(strings.TrimSpace(step), " ")
			process := map[string]*lockProcess{"p": p, "q": q}[who]
			if step == "kill" {
				process.kill()
			} else if command, want, ok := strings.Cut(step, " = "); ok {
				process.do(want, "%s", paths.Replace(command))
			} else if command, want, ok := strings.Cut(step, " always "); ok {
				for range 50 {
					process.do(want, "%s", paths.Replace(command))
				}
			} else if command, want, ok := strings.Cut(step, " eventually "); ok {
				process.eventually(want, "%s", paths.Replace(command))
			} else {
				t.Fatalf("invalid line of a lock script: %q", line)
			}
		}
	}
}
