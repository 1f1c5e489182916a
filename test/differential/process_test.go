package differential

import (
	"strings"
	"testing"
)

// checkErrno runs operations with LikeNFS. It checks the errno of the last operation with a verb,
// and that both sides agree.
func checkErrno(t *testing.T, ops, verb, want string) {
	t.Helper()
	p := localPair(t)
	p.LikeNFS = true
	got := ""
	p.distort = func(o *Op, fields []Field) {
		if o.do == verb {
			got = fields[0].Value
		}
	}
	if found := runText(t, p, ops); found != nil || got != want {
		t.Errorf("%s: got %q and difference %v, want %q", ops, got, found, want)
	}
}

// TestSendfileToItsOwnSourceIsSkipped checks which sendfile operations run.
func TestSendfileToItsOwnSourceIsSkipped(t *testing.T) {
	const begin = "open path=a flags=0x42 mode=0644\nwrite n=100 seed=1\nopen path=a fd=1 flags=0x42\n"
	for ops, want := range map[string]string{
		"sendfile fd=1 n=100":                            ok, // reads 0 to 100 and writes 100 to 200
		"sendfile fd=1 n=101":                            "skipped",
		"lseek fd=1 off=50\nsendfile fd=1 n=51":          "skipped",
		"lseek fd=1 off=200\nsendfile fd=1 n=150":        "skipped",
		"open path=b flags=0x42 fd=1\nsendfile fd=1 n=9": ok,
	} {
		checkErrno(t, begin+ops, "sendfile", want)
	}
}

// TestEndOfDirectoryIsSkipped checks which lseek operations run.
func TestEndOfDirectoryIsSkipped(t *testing.T) {
	for ops, want := range map[string]string{
		"mkdir path=a mode=0755\nopen path=a\nlseek flags=0x2 off=-5000":           "skipped",
		"mkdir path=a mode=0755\nopen path=a\nlseek flags=0x2":                     "skipped",
		"mkdir path=a mode=0755\nopen path=a\nlseek flags=0x0":                     ok,
		"open path=a flags=0x42 mode=0644\nlseek flags=0x2 off=5":                  ok,
		"open path=a flags=0x42 mode=0644\nlseek flags=0x2 off=-5":                 "EINVAL",
		"open path=a flags=0x42 mode=0644\nlseek flags=0x1\nlseek flags=0x2 off=1": ok,
	} {
		checkErrno(t, ops, "lseek", want)
	}
}

// TestLocksWithoutAccessAreSkipped checks that only users who may neither read nor write the file
// skip locks.
func TestLocksWithoutAccessAreSkipped(t *testing.T) {
	for mode, want := range map[string]string{"0600": "skipped", "0604": ok, "0602": ok} {
		for _, do := range []string{"flock flags=0x6", "lock n=1", "plock n=1", "getlk n=1"} {
			ops := "open path=a as=1 flags=0x42 mode=0644\nchown path=a\nchmod path=a mode=" + mode + "\n" + do
			verb, _, _ := strings.Cut(do, " ")
			checkErrno(t, ops, verb, want)
		}
	}
}
