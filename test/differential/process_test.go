package differential

import "testing"

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
		p := localPair(t)
		p.LikeNFS = true
		got := ""
		p.distort = func(o *Op, fields []Field) {
			if o.do == "sendfile" {
				got = fields[0].Value
			}
		}
		if found := runText(t, p, begin+ops); found != nil || got != want {
			t.Errorf("%s: got %q and difference %v, want %q", ops, got, found, want)
		}
	}
}
