package kernelfault

import (
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		name string
		want release
		ok   bool
	}{
		{"6.18.44", release{6, 18, 44}, true},
		{"6.18.44-fc-v657", release{6, 18, 44}, true},
		{"6.12.117+deb12-amd64", release{6, 12, 117}, true},
		{"6.14.0-27-generic", release{6, 14, 0}, true},
		{"6.19.0-rc3", release{6, 19, -1}, true},
		{"7.3-rc1", release{7, 3, -1}, true},
		{"6.19-amd64", release{6, 19, 0}, true},
		{"7.2", release{7, 2, 0}, true},
		{"7.2.6-arch2-1", release{7, 2, 6}, true},
		{"7.2.0-rcu-test", release{7, 2, 0}, true},
		{"6.18.44.5", release{}, false},
		{"7", release{}, false},
		{"7.", release{}, false},
		{".7.2", release{}, false},
		{"7..2", release{}, false},
		{"7.2.6 ", release{}, false},
		{"7.2x", release{}, false},
		{"-7.2", release{}, false},
		{"7.99999", release{}, false},
		{"7.99999999999999999999", release{}, false},
		{"v7.2", release{}, false},
		{"unknown", release{}, false},
		{"", release{}, false},
	} {
		got, ok := parse(c.name)
		if ok != c.ok || ok && got != c.want {
			t.Errorf("%q: got %v, %t, want %v, %t", c.name, got, ok, c.want, c.ok)
		}
	}
}

func TestURing(t *testing.T) {
	const refused, warned, fine = "can damage the memory", "may have CVE-2026-90095", ""
	for _, c := range []struct{ name, want string }{
		{"6.12.117+deb12-amd64", "are not known"}, // with FUSE over io_uring of a distribution
		{"6.13.12", "are not known"},
		{"6.14.0", refused},
		{"6.14.0-rc5", "are not known"},
		{"6.14.1-rc1", refused},
		{"6.17.13", refused},
		{"6.18.38", refused},
		{"6.18.39", warned},
		{"6.18.44-fc-v657", warned},
		{"6.18.250", warned},
		{"6.19.0-rc3", refused},
		{"6.19.14", refused},
		{"7.0.12", refused},
		{"7.1.3", refused},
		{"7.1.4", warned},
		{"7.2.0-rc7", refused},
		{"7.2.0", warned},
		{"7.2.5", warned},
		{"7.2.6", fine},
		{"7.3.0-rc1", fine},
		{"7.3.0", fine},
		{"8.0.0", fine},
		{"garbage", `in Linux "garbage" are not known`},
		{"", "are not known"},
	} {
		refuse, warn := URing(c.name)
		got := ""
		switch {
		case refuse != nil && warn != nil:
			t.Errorf("%q: got both %v and %v", c.name, refuse, warn)
		case refuse != nil:
			got = refuse.Error()
		case warn != nil:
			got = warn.Error()
		}
		if !strings.Contains(got, c.want) || c.want == fine && got != "" || (refuse != nil) != (c.want == refused) {
			t.Errorf("%q: got refusal %v and warning %v, want %q", c.name, refuse, warn, c.want)
		}
	}
}

func TestReleaseOfThisKernel(t *testing.T) {
	if _, ok := parse(Release()); !ok {
		t.Errorf("release of the running kernel: got %q", Release())
	}
}

func TestAtLeast(t *testing.T) {
	for _, c := range []struct {
		name         string
		major, minor int
		want         bool
	}{
		{"6.9.0", 6, 9, true},
		{"6.8.12", 6, 9, false},
		{"6.9.0-rc3", 6, 9, false},
		{"6.12.117+deb12-amd64", 6, 9, true},
		{"5.19.3", 6, 6, false},
		{"7.0.1", 6, 14, true},
		{"unknown", 6, 6, false},
	} {
		if got := AtLeast(c.name, c.major, c.minor); got != c.want {
			t.Errorf("%s at least %d.%d: got %t, want %t", c.name, c.major, c.minor, got, c.want)
		}
	}
}
