// Package knfsd proves the client against stock Linux servers, in the virtual machines of package lab.
package knfsd
